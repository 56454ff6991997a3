"""Mediastinum: heart, great vessels, trachea, main bronchi and oesophagus."""
# ruff: noqa: RUF005 - the lists are vectors that are added

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medseg.phantom.anatomy import Anatomy
from medseg.phantom.lattice import Lattice, draw_tube
from medseg.phantom.shapes import Field, ellipsoid, maximum, union

Points = NDArray[np.float64]


class Tube(NamedTuple):
    """A chain of points xyz in mm with radii in mm."""

    points_xyz_mm: Points
    radii_mm: Points | float


class CentralTubes(NamedTuple):
    """Distances on the whole lattice to large vessels, lumen of the central airways, and oesophagus, (D, H, W), at most 30 mm."""

    blood: Field
    airway: Field
    gullet: Field


class HeartFields(NamedTuple):
    """Signed distances in mm of the heart's outside and of its chambers."""

    outside: Field
    left_ventricle: Field
    right_heart: Field
    left_atrium: Field


def _spine_point(anatomy: Anatomy, z: float, dx: float, dy: float) -> list[float]:
    """Point beside the spine's front edge."""
    x, y, half_width = anatomy.spine_at(z)
    return [x + dx, y - 0.84 * half_width + dy, z]


def bronchi(anatomy: Anatomy) -> dict[str, Tube]:
    """Trachea, main and lower bronchi (lumen); their ends are the roots of the airway trees."""
    r, s = anatomy.trachea_mm, anatomy.shift_x_mm
    return {
        "trachea": Tube(
            np.array([[s * 0.1, -20, 190], [s * 0.2, -14, 140], [s * 0.5, 0, 80], [s * 0.8, 9, 35], [s, 13, 0.0]]), r
        ),
        "right": Tube(
            np.array([[s, 13, 1], [s - 16, 14, -10], [s - 31, 15, -17], [s - 38, 13, -20.0]]),
            np.array([0.8, 0.82, 0.74, 0.6]) * r,
        ),
        "right_lower": Tube(
            np.array([[s - 29, 15, -16], [s - 35, 14, -34], [s - 41, 16, -52.0]]), np.array([0.66, 0.6, 0.5]) * r
        ),
        "left": Tube(
            np.array([[s, 13, 1], [s + 18, 18, -13], [s + 34, 22, -23], [s + 43, 20, -29.0]]),
            np.array([0.76, 0.74, 0.68, 0.56]) * r,
        ),
        "left_lower": Tube(
            np.array([[s + 39, 22, -26], [s + 44, 24, -42], [s + 49, 25, -56.0]]), np.array([0.6, 0.55, 0.48]) * r
        ),
    }


def great_vessels(anatomy: Anatomy) -> dict[str, Tube]:
    """Large vessels outside the lung label."""
    a, d, p, s = anatomy.aorta_mm, 0.78 * anatomy.aorta_mm, anatomy.trunk_mm, anatomy.shift_x_mm
    low = float(anatomy.heart_centre_xyz_mm[2])
    arch = [
        [s + 4, -22, -38], [s - 6, -34, -16], [s - 9, -36, 4], [s - 6, -28, 22], [s + 3, -12, 31], [s + 13, 8, 31],
        _spine_point(anatomy, 18, 19 + 0.7 * s, 1), _spine_point(anatomy, -5, 21 + 0.5 * s, 2),
    ]  # fmt: skip
    down = [
        _spine_point(anatomy, z, dx, -4) for z, dx in ((-40, 20 + 0.3 * s), (-90, 16), (-140, 8), (-200, 3), (-280, 2), (-420, 2))
    ]
    tubes = {
        "aorta": Tube(np.array(arch + down), np.concatenate([a * np.array([1.05, 1.05, 1, 0.98, 0.92, 0.88]), [d * 1.05, d], d * np.array([0.98, 0.95, 0.92, 0.85, 0.75, 0.6])])),
        "brachiocephalic": Tube(np.array([[s - 5, -26, 28], [s - 12, -20, 55], [-26, -8, 78.0]]), np.array([7.0, 6.5, 6.0])),
        "left_carotid": Tube(np.array([[s + 2, -12, 31], [s * 0.5 + 12, -8, 62], [20, -4, 100], [26, 0, 190.0]]), 4.0),
        "right_carotid": Tube(np.array([[-26, -8, 78], [-24, -4, 110], [-26, 0, 190.0]]), 4.0),
        "left_subclavian": Tube(np.array([[s + 12, 6, 31], [s * 0.5 + 22, 10, 62], [30, 8, 88], [60, -8, 100], [110, -10, 88.0]]), 4.8),
        "right_subclavian": Tube(np.array([[-26, -8, 78], [-40, 0, 96], [-70, -10, 98], [-112, -10, 88.0]]), 4.8),
        "trunk": Tube(np.array([[s + 22, -46, -40], [s + 20, -42, -18], [s + 22, -22, -8], [s + 27, -4, -3.0]]), np.array([1.05, 1.05, 1.0, 0.9]) * p),
        "left_pulmonary": Tube(np.array([[s + 27, -4, -3], [s + 37, 10, -3], [s + 46, 22, -14], [s + 51, 28, -34.0]]), np.array([0.85, 0.75, 0.66, 0.5]) * p),
        "right_pulmonary": Tube(np.array([[s + 20, -20, -11], [s + 2, -8, -18], [s - 20, -3, -20], [s - 40, 4, -22], [s - 46, 12, -40.0]]), np.array([0.85, 0.78, 0.74, 0.62, 0.5]) * p),
        "superior_cava": Tube(np.array([[-24 + 0.5 * s, -28, 62], [s - 26, -24, 30], [s - 27, -20, 0], [s - 27, -18, -40.0]]), np.array([8.0, 8.5, 9.5, 10.5])),
        "left_brachiocephalic_vein": Tube(np.array([[40, -22, 78], [16 + 0.5 * s, -36, 60], [s * 0.5 - 10, -38, 50], [s - 24, -28, 42.0]]), 6.5),
        "right_brachiocephalic_vein": Tube(np.array([[-44, -18, 80], [-28 + 0.5 * s, -28, 60.0]]), 7.0),
        "left_jugular": Tube(np.array([[40, -22, 78], [36, -12, 120], [38, -4, 190.0]]), 5.5),
        "right_jugular": Tube(np.array([[-44, -18, 80], [-38, -12, 120], [-40, -4, 190.0]]), 6.0),
        "azygos": Tube(np.array([_spine_point(anatomy, -160, -8, -3), _spine_point(anatomy, -60, -9, -4), _spine_point(anatomy, 4, -10, -5), [s - 20, 20, 14], [s - 26, -6, 14], [s - 27, -18, 6]]), 4.0),
        "inferior_cava": Tube(np.array([[s - 22, -6, low - 4], [0.5 * s - 26, 4, low - 40], [-24, 10, low - 80], [-22, 12, -300], [-20, 14, -420.0]]), np.array([12.0, 12.0, 11.5, 11.0, 10.5])),
    }  # fmt: skip
    for side, name in ((1, "left"), (-1, "right")):
        atrium = np.array([s + 2.0, 6.0, low + 18])
        for level, start, end in (("upper", (14, 0, 4), (34, -6, 14)), ("lower", (14, 4, -8), (36, 14, -12))):
            ends = np.stack([atrium + np.array([side, 1, 1]) * one for one in (start, end)])
            tubes[f"{name}_{level}_vein"] = Tube(ends, np.array([8.0, 6.0]))
    return tubes


def vein_roots(anatomy: Anatomy, side: int) -> Points:
    """Point where the pulmonary veins of one side leave the lung, xyz in mm."""
    return np.array([anatomy.shift_x_mm + 2.0 + side * 36, 6.0, float(anatomy.heart_centre_xyz_mm[2]) + 20.0])


def hilum(anatomy: Anatomy, side: int) -> Points:
    """Point where bronchus and artery of one side enter the lung, xyz in mm."""
    return bronchi(anatomy)["left" if side > 0 else "right"].points_xyz_mm[-1]


def oesophagus(anatomy: Anatomy) -> Tube:
    """Oesophagus, in front of the spine and left of the midline below."""
    s = anatomy.shift_x_mm
    points = [[2 + s * 0.2, 4, 150], [4 + s * 0.4, 18, 90]] + [
        _spine_point(anatomy, z, dx + s * f, -9) for z, dx, f in ((40, 4, 0.7), (0, 4, 0.8), (-50, 2, 0.7))
    ]
    points += [_spine_point(anatomy, -95, 10, -20), _spine_point(anatomy, -130, 26, -34)]
    return Tube(np.array(points), np.array([6.5, 7, 7, 7, 7.5, 8, 8.0]))


def draw_central_tubes(anatomy: Anatomy, lattice: Lattice) -> CentralTubes:
    """Draw vessels, airways and oesophagus."""
    fields = CentralTubes(lattice.full(30), lattice.full(30), lattice.full(30))
    groups = (great_vessels(anatomy).values(), 14), (bronchi(anatomy).values(), 14), ([oesophagus(anatomy)], 12)
    for field, (tubes, margin_mm) in zip(fields, groups, strict=True):
        for tube in tubes:
            draw_tube(field, lattice, *tube, margin_mm=margin_mm)
    return fields


def heart_fields(anatomy: Anatomy, x: Field, y: Field, z: Field) -> HeartFields:
    """Measure the heart: an egg of two ventricles with the atria behind and to the right."""
    centre = anatomy.heart_centre_xyz_mm + [anatomy.shift_x_mm, 0, 0]
    axes, radii = anatomy.heart_axes, np.array(anatomy.heart_radii_mm)
    ventricles = ellipsoid(x, y, z, centre, radii, axes)
    atrium_left = ellipsoid(x, y, z, centre + [-16, 36, 20], (33, 19, 23))
    atrium_right = ellipsoid(x, y, z, centre + [-38, 12, 2], (27, 29, 37))
    outside = union(union(ventricles, atrium_left, 12), atrium_right, 14)
    left = ellipsoid(x, y, z, centre + 7 * axes[0] + [9, 9, -2], radii * [0.66, 0.44, 0.44], axes)
    right = ellipsoid(x, y, z, centre + [-10, -13, -2], radii * [0.78, 0.62, 0.5], axes)
    right = np.minimum(maximum(right, 9 - left, outside + 4), atrium_right + 4)
    return HeartFields(outside, left, right, atrium_left + 3)
