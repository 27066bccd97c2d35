import numpy as np
import pytest

from deepmd_muon.infer import learning_curve
from deepmd_muon.infer.errors import PictureError
from deepmd_muon.infer.learning_curve import plot_learning_curve, read_learning_curve
from deepmd_muon.train.report import LearningCurveFile


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


def test_picture_has_a_panel_a_quantity_and_one_for_the_rate(curve, tmp_path):
    plot_learning_curve(curve, tmp_path / "pictures" / "lcurve.png")
    from matplotlib.image import imread

    image = imread(tmp_path / "pictures" / "lcurve.png")
    assert image.shape[1] == int(4.2 * 3 * 150)
    assert image.std() > 0.01


def test_absolute_errors_are_drawn_as_such(tmp_path, monkeypatch):
    file = LearningCurveFile(tmp_path / "lcurve.out", 100)
    for step in (1, 2):
        file.step(step, 1e-3, {"rmse": 2.0, "mae_e": 0.5, "mae_f": 0.25}, {"rmse": 3.0, "mae_e": 0.75, "mae_f": 0.5})
    file.close()
    drawn = []
    monkeypatch.setattr(learning_curve, "write", lambda figure, picture: drawn.append(figure))
    plot_learning_curve(tmp_path / "lcurve.out", tmp_path / "lcurve.png")
    panels = drawn[0].axes
    assert [axes.get_ylabel() for axes in panels[:-1]] == ["MAE [eV/atom]", "MAE [eV/Å]"]
    lines = {line.get_label(): line.get_ydata().tolist() for line in panels[1].lines}
    assert lines == {"training": [0.25, 0.25], "validation": [0.5, 0.5]}


def test_what_is_no_learning_curve_is_refused(tmp_path):
    with pytest.raises(PictureError, match="there is no learning curve"):
        read_learning_curve(tmp_path / "none.out")
    (tmp_path / "text.out").write_text("hello\n1 2 3\n")
    with pytest.raises(PictureError, match="holds no row below a header"):
        read_learning_curve(tmp_path / "text.out")
