import numpy as np
import pytest

from deepmd_muon.show import learning_curve
from deepmd_muon.show.errors import PictureError
from deepmd_muon.show.learning_curve import plot_learning_curves, read_learning_curve
from deepmd_muon.show.picture import COLUMN, PANEL
from deepmd_muon.train.report import JsonLinesFile, LearningCurveFile


@pytest.fixture
def curve(tmp_path):
    """A learning curve that gains validation at a restart, and whose last row is torn."""
    path = tmp_path / "lcurve.out"
    train = {"rmse": 2.0, "rmse_e": 0.5, "rmse_f": 0.25}
    file = LearningCurveFile(path, 100)
    file.step(1, 1e-3, train, {})
    file.step(100, 5e-4, train, {})
    file.close()
    file = LearningCurveFile(path, 100, start_step=100)
    file.step(200, 2.5e-4, train, {"rmse": 4.0, "rmse_e": 1.0, "rmse_f": 0.75})
    file.close()
    with path.open("a") as tail:
        tail.write("    300      1.0")
    return path


def test_rows_are_read_back_with_nan_for_columns_of_later_rows(curve):
    columns = read_learning_curve(curve)
    assert columns["step"].tolist() == [1, 100, 200]
    assert columns["lr"].tolist() == [1e-3, 5e-4, 2.5e-4]
    assert columns["rmse_f_trn"].tolist() == [0.25, 0.25, 0.25]
    assert np.isnan(columns["rmse_f_val"][:2]).all()
    assert columns["rmse_f_val"][2] == 0.75


def test_picture_has_a_panel_a_quantity(curve, tmp_path):
    plot_learning_curves([curve], tmp_path / "pictures" / "lcurve.png")
    from matplotlib.image import imread

    image = imread(tmp_path / "pictures" / "lcurve.png")
    assert image.shape[1] == int(PANEL * 2 * 300)
    assert image.std() > 0.01


def test_stacked_panels_fill_one_column(curve, tmp_path):
    plot_learning_curves([curve], tmp_path / "stacked.png", stacked=True)
    from matplotlib.image import imread

    height, width, _ = imread(tmp_path / "stacked.png").shape
    assert width == int(COLUMN * 300)
    assert height > width


def drawn_lines(monkeypatch, *arguments, **options):
    """Draw, and return the points of every line by panel and label."""
    figures = []
    monkeypatch.setattr(learning_curve, "write", lambda figure, picture: figures.append(figure))
    plot_learning_curves(*arguments, **options)
    panels = [axes for axes in figures[0].axes if axes.get_title()]
    lines = {
        axes.get_title(): {
            line.get_label(): (line.get_xdata().tolist(), line.get_ydata().tolist())
            for line in axes.lines
        }
        for axes in panels
    }
    return figures[0], lines


def test_absolute_errors_are_drawn_as_such(tmp_path, monkeypatch):
    file = LearningCurveFile(tmp_path / "lcurve.out", 100)
    for step in (1, 2):
        file.step(
            step,
            1e-3,
            {"rmse": 2.0, "mae_e": 0.5, "mae_f": 0.25},
            {"rmse": 3.0, "mae_e": 0.75, "mae_f": 0.5},
        )
    file.close()
    figure, lines = drawn_lines(monkeypatch, [tmp_path / "lcurve.out"], tmp_path / "lcurve.png")
    assert [axes.get_ylabel() for axes in figure.axes if axes.get_title()] == [
        "MAE [eV/atom]",
        "MAE [eV/Å]",
    ]
    assert lines["Force"] == {
        "training": ([1, 2], [0.25, 0.25]),
        "validation": ([1, 2], [0.5, 0.5]),
    }


@pytest.mark.parametrize("against", ["step", "time"])
def test_several_runs_share_a_picture(tmp_path, monkeypatch, against):
    for name, error in (("adam", 0.4), ("muon", 0.1)):
        file = JsonLinesFile(tmp_path / f"{name}.jsonl", 100)
        file.step(1, 1e-3, {"rmse_f": 1.0}, {"rmse_f": 1.5})
        file.step(100, 1e-4, {"rmse_f": error}, {"rmse_f": float("nan")})
        file.close()
    files = [tmp_path / "adam.jsonl", tmp_path / "muon.jsonl"]
    _, lines = drawn_lines(
        monkeypatch, files, tmp_path / "both.pdf", ["Adam", "HybridMuon"], against
    )
    assert list(lines["Force"]) == [
        "Adam, validation",
        "Adam, training",
        "HybridMuon, validation",
        "HybridMuon, training",
    ]
    times, errors = lines["Force"]["HybridMuon, training"]
    assert errors == [1.0, 0.1]
    assert times == read_learning_curve(files[1])[against].tolist()
    assert len(lines["Force"]["Adam, validation"][0]) == 1


def test_what_several_runs_need(curve, tmp_path):
    with pytest.raises(PictureError, match="labels"):
        plot_learning_curves([curve, curve], tmp_path / "both.png", ["Adam"])
    with pytest.raises(PictureError, match="jsonl_file"):
        plot_learning_curves([curve], tmp_path / "time.png", against="time")


def test_rejects_non_learning_curves(tmp_path):
    with pytest.raises(PictureError, match="there is no learning curve"):
        read_learning_curve(tmp_path / "none.out")
    (tmp_path / "text.out").write_text("hello\n1 2 3\n")
    with pytest.raises(PictureError, match="holds no row below a header"):
        read_learning_curve(tmp_path / "text.out")


def test_a_damaged_row_is_named_and_a_torn_one_is_left_out(tmp_path):
    path = tmp_path / "lcurve.out"
    path.write_text("# step rmse_e_trn lr\n1 0.5 0.1\n2 0.x 0.1\n3 0.3 0.1\n")
    with pytest.raises(PictureError, match=r"lcurve.out, line 3"):
        read_learning_curve(path)
    path.write_text("# step rmse_e_trn lr\n1 0.5 0.1\n2 0.4 1e-")
    assert read_learning_curve(path)["rmse_e_trn"].tolist() == [0.5]
