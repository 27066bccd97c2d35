"""Small files in the forms of VASP 5 and 6: two copper atoms, numbers of our own."""

from typing import NamedTuple

NELM, EDIFF = 8, 1e-4
REACHED = "------------------------ aborting loop because EDIFF is reached -----------------\n"
NOT_REACHED = "------------------------ aborting loop EDIFF was not reached (unconverged) ------\n"
HARD_STOP = "------------------------ aborting loop because hard stop was set ----------------\n"


class Step(NamedTuple):
    """An ionic step: what its electronic loop did, and its energy."""

    energy: float  # [eV]
    loops: int
    change: float  # of the energy in the last electronic step [eV]
    band_change: float = 0.0  # of the band structure's energy [eV]
    ending: str = REACHED
    distance: float = 2.5  # of the atoms, along x [Å]
    force: float = 0.5  # of the second atom along x [eV/Å]


# The ends of an electronic loop: each with whether it converged, in VASP 5's words and in 6's.
ENDS = [
    (Step(-3.0, 5, 5e-5), True, REACHED),
    (Step(-3.1, NELM, -5e-5), True, REACHED),  # in its last step
    (Step(-3.2, NELM, -2.5e-3), False, NOT_REACHED),
    (Step(-3.3, NELM, 18.25), False, NOT_REACHED),
    (Step(-3.4, NELM - 1, 2e-5), True, REACHED),
]


def outcar(steps, version=5, *, most=NELM):
    """Return the text of an OUTCAR."""
    echo = f"   NELM = {most}\n   EDIFF = {EDIFF}\n" if version == 6 else ""
    name = "vasp.6.3.0 20Jan22" if version == 6 else "vasp.5.4.4.18Apr17"
    head = (
        f" {name} complex\n{echo}"
        " POTCAR:    PAW_PBE Cu 22Jun2005\n   TITEL  = PAW_PBE Cu 22Jun2005\n"
        "   k-points           NKPTS =      1   k-points in BZ     NKDIM =      1   "
        "number of bands    NBANDS=     12\n"
        "   ions per type =               2\n"
        "   ISPIN  =      1    spin polarized calculation?\n"
        f"   NELM   = {most:6d};   NELMIN=  2; NELMDL= -5     # of ELM steps \n"
        "   EDIFF  = 0.1E-03   stopping-criterion for ELM\n"
        "   EDIFFG = 0.1E-02   stopping-criterion for IOM\n"
        " k-points in reciprocal lattice and weights: read from INCAR\n"
        "   0.00000000  0.00000000  0.00000000       1.000\n"
    )
    return head + "".join(
        ionic_step(step, number + 1, version) for number, step in enumerate(steps)
    )


def ionic_step(step, number, version=5):
    """Return the lines of one ionic step of an OUTCAR."""
    loops = []
    for k in range(1, step.loops + 1):
        change = step.change if k == step.loops else 10.0 / k
        band = step.band_change if k == step.loops else -9.0 / k
        loops.append(
            f"--------------------- Iteration {number:6d}({k:4d})  ---------------------\n"
            f" total energy-change (2. order) :{change:14.7E}  ({band:14.7E})\n"
            f"  free energy    TOTEN  = {step.energy:18.8f} eV\n"
        )
    stress = (
        "  FORCE on cell =-STRESS in cart. coord.  units (eV):\n"
        "  in kB      -2.00000    -1.00000    -4.00000     0.30000    -0.90000     2.40000\n"
    )
    words = "FREE ENERGIE OF THE ION-ELECTRON SYSTEM (eV)"
    return (
        "".join(loops)
        + step.ending
        + stress
        + geometry(distance=step.distance, force=step.force)
        + f"  {words}\n  ---------------------------------------------------\n"
        f"  free  energy   TOTEN  = {step.energy:18.8f} eV\n\n"
        f"  energy  without entropy= {step.energy:18.8f}  energy(sigma->0) = {step.energy:18.8f}\n"
    )


def geometry(note="", distance=2.5, force=0.5):
    """Return cell, positions and forces as an OUTCAR has them."""
    return (
        "      direct lattice vectors                 reciprocal lattice vectors\n"
        "     9.000000000  0.000000000  0.000000000     0.111111111  0.000000000  0.000000000\n"
        "     0.000000000  9.000000000  0.000000000     0.000000000  0.111111111  0.000000000\n"
        "     0.000000000  0.000000000  9.000000000     0.000000000  0.000000000  0.111111111\n"
        f" POSITION                                       TOTAL-FORCE (eV/Angst){note}\n"
        " -----------------------------------------------------------------------------------\n"
        f"      0.00000      0.00000      0.00000     {-force:12.6f}      0.000000      0.000000\n"
        f"    {distance:9.5f}      0.00000      0.00000     {force:12.6f}      0.000000      0.000000\n"
        " -----------------------------------------------------------------------------------\n"
        "    total drift:                                0.000000      0.000000      0.000000\n"
    )


def force_field_step(energy):
    """Return an ionic step that VASP 6's machine-learned force field predicted."""
    return (
        geometry(" (ML)")
        + "  ML FREE ENERGIE OF THE ION-ELECTRON SYSTEM (eV)\n"
        + "  ---------------------------------------------------\n"
        f"  free  energy ML TOTEN  = {energy:18.8f} eV\n\n"
        f"  ML energy  without entropy= {energy:18.8f}  ML energy(sigma->0) = {energy:18.8f}\n"
        "  enthalpy is ML TOTEN    =         0.62422858 eV   P V=        0.62422858\n"
    )


def vasprun(steps, version=5, *, most=NELM):
    """Return the text of a vasprun.xml."""
    # The section has NELM in VASP 5 only; its number is 1 unless a GW calculation sets it.
    responses = '<i type="int" name="NELM">     1</i>' if version == 5 else ""
    rows = "".join(f"<rc><c>Cu</c><c>{kind}</c></rc>" for kind in (1, 1))
    return (
        '<?xml version="1.0" encoding="ISO-8859-1"?>\n<modeling>\n'
        ' <kpoints><varray name="kpointlist" ><v> 0.0 0.0 0.0 </v></varray>'
        '<varray name="weights" ><v> 1.0 </v></varray></kpoints>\n'
        ' <incar><i name="EDIFF">      0.00010000</i></incar>\n <parameters>\n'
        '  <separator name="electronic" ><i name="EDIFF">      0.00010000</i>\n'
        '   <separator name="electronic convergence" >'
        f'<i type="int" name="NELM">{most:6d}</i></separator>\n'
        "  </separator>\n"
        '  <separator name="response functions" ><i name="OMEGAMAX">    -1.0</i>'
        f"{responses}</separator>\n"
        " </parameters>\n <atominfo><atoms> 2 </atoms><types> 1 </types>\n"
        f'  <array name="atoms" ><set>{rows}</set></array></atominfo>\n'
        f' <structure name="initialpos" >{structure()}</structure>\n'
        + "".join(map(calculation, steps))
        + "</modeling>\n"
    )


def structure(distance=2.5):
    """Return cell and positions as a vasprun.xml has them."""
    return (
        '<crystal><varray name="basis" >'
        "<v> 9.0 0.0 0.0 </v><v> 0.0 9.0 0.0 </v><v> 0.0 0.0 9.0 </v>"
        '</varray></crystal><varray name="positions" ><v> 0.0 0.0 0.0 </v>'
        f"<v> {distance / 9:.8f} 0.0 0.0 </v></varray>"
    )


def calculation(step):
    """Return one ionic step of a vasprun.xml."""
    energies = [step.energy + 10.0 / k for k in range(1, step.loops + 1)]
    energies[-1] = step.energy
    if step.loops > 1:
        energies[-2] = step.energy - step.change
    loops = "".join(f"<scstep>{energy(value)}</scstep>\n" for value in energies)
    return (
        f" <calculation>\n{loops}<structure>{structure(step.distance)}</structure>"
        f'<varray name="forces" ><v> {-step.force:.8f} 0.0 0.0 </v>'
        f"<v> {step.force:.8f} 0.0 0.0 </v></varray>"
        '<varray name="stress" ><v> -2.0 0.3 2.4 </v><v> 0.3 -1.0 -0.9 </v><v> 2.4 -0.9 -4.0 </v>'
        f"</varray>{energy(step.energy)}\n </calculation>\n"
    )


def energy(value):
    """Return an element of energies."""
    names = ("e_fr_energy", "e_wo_entrp", "e_0_energy")
    return (
        "<energy>"
        + "".join(f'<i name="{name}"> {value:16.8f} </i>' for name in names)
        + "</energy>"
    )
