"""Organs of the chest as distance fields: bones, heart, great vessels, trachea, bronchi and oesophagus."""
# ruff: noqa: RUF005 - the lists are vectors that are added

import numpy as np
from numpy.typing import NDArray

from medseg.phantom.shapes import (
    Field,
    Fields,
    Lattice,
    draw_tube,
    ellipsoid,
    maximum,
    profile,
    superellipse,
    union,
)
from medseg.phantom.spec import SIDES, Anatomy

Points = NDArray[np.float64]
Tube = tuple[Points, Points | float]
"""A chain of points xyz in mm with radii in mm."""

VERTEBRA_MM = 23.5  # height of a thoracic vertebra with its disc
_RIB_REACH = (
    0.62,
    0.76,
    0.88,
    0.92,
    0.94,
    0.95,
    0.93,
    0.88,
    0.80,
    0.68,
    0.50,
    0.36,
)  # share of the way to the front


def vertebra_z_mm(number: int) -> float:
    """Middle of thoracic vertebra `number` (1 … 12; larger are lumbar, smaller cervical): T5 lies at the carina."""
    return (5.0 - number) * VERTEBRA_MM + 2.0


def rib_path(anatomy: Anatomy, number: int, side: int) -> Points:
    """Middle line of a rib from the spine to its front end, (n, 3) xyz in mm.

    The rib keeps 6 mm from the pleura, starts at its vertebra and falls by about two vertebrae
    towards the side and the front.
    """
    turn = np.linspace(0, np.pi * _RIB_REACH[number - 1], 26)
    start = vertebra_z_mm(number) + 9
    fall = np.interp(number, (1, 3, 7, 12), (30, 52, 78, 60))
    z = (start - fall * np.sin(np.clip(turn / 2.0, 0, np.pi / 2)) ** 1.5)[:, None, None].astype(
        np.float32
    )
    cx, cy, ax, ay = (
        np.asarray(v, dtype=np.float64).ravel() for v in anatomy.thorax_centre(z, side)
    )
    outward, back = np.sin(turn) + 0.35 * np.cos(turn) ** 3 * -1, np.cos(turn)
    outward, back = outward / np.hypot(outward, back), back / np.hypot(outward, back)
    power = np.where(back > 0, 2.0, 2.0 + anatomy.flatness)
    level = (np.abs(outward) / np.maximum(ax, 14)) ** power + (
        np.abs(back) / np.maximum(ay, 14)
    ) ** power
    radius = 1 / level ** (1 / power) + 6.0
    path = np.stack(
        [cx + side * outward * radius, cy + back * radius, z.ravel().astype(np.float64)], axis=1
    )
    x, y, half_width = anatomy.spine_at(start)
    joint = np.array([x + side * (half_width + 2), y + 11, start])
    neck = np.array([joint[0] + side * 16, joint[1] + 12, start - 2])
    keep = (path[:, 0] * side > neck[0] * side + 6) | (turn > 1.0)
    return np.concatenate([[joint], [neck], path[keep]])


def draw_bones(anatomy: Anatomy, lattice: Lattice, arms: str) -> Fields:
    """Draw the bones except the spine.

    Args:
        anatomy: The patient.
        lattice: The lattice to draw on.
        arms: `up`, `down` or `none`.

    Returns:
        Distances to `bone` and to costal `cartilage`, (D, H, W), at most 30 mm.
    """
    bone, cartilage = lattice.full(30), lattice.full(30)
    sternum = sternum_path(anatomy)
    for side in SIDES:
        for number in range(1, 13):
            path = rib_path(anatomy, number, side)
            taper = np.interp(np.arange(len(path)), (0, 1, 2, len(path) - 1), (4.0, 3.4, 3.2, 3.6))
            draw_tube(bone, lattice, path, taper, stretch_z=1.75)
            if number <= 10:
                level = float(
                    np.interp(
                        number, (1, 2, 3, 4, 5, 6, 7, 10), (54, 36, 16, -6, -28, -48, -66, -84)
                    )
                )
                end = np.array(
                    [
                        side * 15.0,
                        float(np.interp(level, sternum[::-1, 2], sternum[::-1, 1])),
                        level,
                    ]
                )
                middle = 0.5 * (path[-1] + end) + np.array([0, -6.0, -9.0 if number > 4 else 0.0])
                draw_tube(
                    cartilage,
                    lattice,
                    np.stack([path[-1], middle, end]),
                    np.array([4.6, 4.2, 4.0]),
                    stretch_z=1.5,
                )
        manubrium = np.array([side * 20.0, sternum[0, 1] + 1, sternum[0, 2] - 2])
        acromion = np.array([side * 150.0 * anatomy.width_factor, 26, 92 if arms != "up" else 108])
        clavicle = [
            manubrium,
            manubrium + [side * 32, -3, 8],
            0.45 * manubrium + 0.55 * acromion + [0, 0, 6],
            acromion + [-side * 18, -8, 3],
            acromion,
        ]
        draw_tube(bone, lattice, np.stack(clavicle), np.array([9.0, 6.5, 5.5, 6.5, 6.5]))
        _draw_scapula(bone, lattice, anatomy, side, arms)
        if arms != "none":
            shoulder, elbow = arm_path(anatomy, side, arms)
            draw_tube(
                bone,
                lattice,
                np.stack([shoulder, 0.85 * shoulder + 0.15 * elbow, elbow]),
                np.array([21.0, 12.0, 10.5]),
            )
    draw_tube(bone, lattice, sternum[:2], np.array([8.0, 7.0]))
    for offset in (-14.0, -7.0, 0.0, 7.0, 14.0):
        draw_tube(
            bone, lattice, sternum + np.outer([1.0, 0.75, 0.8, 0.9, 0.4], [offset, 0, 0]), 5.6
        )
    return {"bone": bone, "cartilage": cartilage}


def sternum_path(anatomy: Anatomy) -> Points:
    """Middle line of manubrium, body and xiphoid, (5, 3) xyz in mm, 9 mm in front of the pleura."""
    levels = np.array([58.0, 24.0, -10.0, -62.0, -92.0], dtype=np.float32)
    x, ys = np.zeros((1, 1, 1), dtype=np.float32), np.linspace(-140, 20, 321, dtype=np.float32)
    halves = (
        anatomy.half_thorax(x, ys[None, :, None], levels[:, None, None], side)[0] for side in SIDES
    )
    is_near = np.minimum(*halves)[:, :, 0] < 4
    front = np.where(is_near.any(axis=1), ys[np.argmax(is_near, axis=1)].astype(np.float64), 20.0)
    front = np.minimum(np.maximum(front, -110), [-46.0, -66.0, -70.0, -70.0, -70.0])
    return np.stack([np.zeros(5), front - 7, levels.astype(np.float64)], axis=1)


def arm_path(anatomy: Anatomy, side: int, arms: str) -> tuple[Points, Points]:
    """Ends of the upper arm, xyz in mm."""
    if arms == "up":
        return np.array([side * 158.0 * anatomy.width_factor, 24.0, 108.0]), np.array(
            [side * 165.0, -30.0, 330.0]
        )
    return np.array([side * 178.0 * anatomy.width_factor, 28.0, 78.0]), np.array(
        [side * 222.0, 40.0, -210.0]
    )


def _draw_scapula(bone: Field, lattice: Lattice, anatomy: Anatomy, side: int, arms: str) -> None:
    """Draw the blade as a fan of thin bars, its spine and the socket."""
    lift, wide = 14.0 if arms == "up" else 0.0, anatomy.width_factor
    tip = np.array([side * (96 + lift) * wide, 96.0 - lift, -52 + lift])
    inner = np.array([side * 66 * wide, 92.0, 64 + lift])
    socket = np.array([side * 148 * wide, 42.0, 70 + lift])
    for share in np.linspace(0, 1, 15):
        edge, far = (corner * (1 - share) + tip * share for corner in (inner, socket))
        bulge = 0.5 * (edge + far) + np.array([side * 5.0, 5.0, 0.0])
        draw_tube(bone, lattice, np.stack([edge, bulge, far]), np.array([2.3, 1.7, 3.4]))
    draw_tube(
        bone, lattice, np.stack([inner + [0, 2, -14], socket + [0, 22, 14]]), np.array([3.0, 5.0])
    )
    draw_tube(
        bone,
        lattice,
        np.stack([socket + [-side * 4, 0, 12], socket + [-side * 4, 0, -12]]),
        np.array([8.0, 9.0]),
    )


def spine_fields(anatomy: Anatomy, x: Field, y: Field, z: Field) -> Fields:
    """Measure the spine.

    Args:
        anatomy: The patient.
        x: World x in mm, (1, 1, W).
        y: World y in mm, (1, H, 1).
        z: World z in mm, (d, 1, 1).

    Returns:
        Distances to the vertebral bodies with arches, waisted between the discs (`spine`), to the
        bodies alone with discs (`column`), to the spinal canal (`canal`), and the place within a
        segment (`disc`, (d, 1, 1): 0 in the middle of a vertebra, 1 in the middle of a disc).
    """
    middle_x, middle_y, radius = anatomy.spine(z)
    dx, dy = x - middle_x, y - middle_y
    phase = (z - np.float32(vertebra_z_mm(5))) / np.float32(VERTEBRA_MM)
    drop = phase - np.round(phase)
    disc = np.abs(drop) * 2
    column = superellipse(dx, dy, radius, radius * np.float32(0.84), 2.5)
    waist = np.maximum(
        column + np.float32(1.8) * (1 - disc * disc),
        np.float32(VERTEBRA_MM / 2) * (disc - np.float32(0.8)),
    )
    behind = radius * np.float32(0.84) + 7.5
    lateral, depth = np.abs(dx), dy - behind
    canal = superellipse(dx, depth, 10.0, 8.0, 2)
    arch = np.maximum(np.abs(canal - 3.0) - 3.2, np.float32(9) * (disc - np.float32(0.62)))
    wings = maximum(
        np.abs(depth - np.float32(0.22) * (lateral - 8)) - 4.2,
        lateral - 32,
        7 - lateral,
        np.abs(drop - np.float32(0.12)) * np.float32(VERTEBRA_MM) - np.float32(6),
    )
    slant = np.abs(((phase + depth * np.float32(0.018)) % 1.0) - np.float32(0.5)) * np.float32(
        VERTEBRA_MM
    )
    length = profile(z, (120, 60, -150, -300), (34, 30, 26, 34))
    spinous = maximum(lateral - 3.0, behind + 8 - dy, depth - length, slant - np.float32(7.5))
    bone = union(waist, np.maximum(arch, -np.clip((np.float32(0.75) - disc) * 12, -8, 8)), 2.0)
    bone = np.maximum(np.minimum(bone, np.minimum(wings, spinous)), 0.5 - canal)
    return {"spine": bone, "column": np.asarray(column), "canal": canal, "disc": disc}


def _spine_point(anatomy: Anatomy, z: float, dx: float, dy: float) -> list[float]:
    """Point beside the spine's front edge."""
    x, y, half_width = anatomy.spine_at(z)
    return [x + dx, y - 0.84 * half_width + dy, z]


def bronchi(anatomy: Anatomy) -> dict[str, Tube]:
    """Trachea, main and lower bronchi (lumen); their ends are the roots of the airway trees."""
    r, s = anatomy.trachea_mm, anatomy.shift_x_mm
    return {
        "trachea": (
            np.array(
                [
                    [s * 0.1, -20, 190],
                    [s * 0.2, -14, 140],
                    [s * 0.5, 0, 80],
                    [s * 0.8, 9, 35],
                    [s, 13, 0.0],
                ]
            ),
            r,
        ),
        "right": (
            np.array([[s, 13, 1], [s - 16, 14, -10], [s - 31, 15, -17], [s - 38, 13, -20.0]]),
            np.array([0.8, 0.82, 0.74, 0.6]) * r,
        ),
        "right_lower": (
            np.array([[s - 29, 15, -16], [s - 35, 14, -34], [s - 41, 16, -52.0]]),
            np.array([0.66, 0.6, 0.5]) * r,
        ),
        "left": (
            np.array([[s, 13, 1], [s + 18, 18, -13], [s + 34, 22, -23], [s + 43, 20, -29.0]]),
            np.array([0.76, 0.74, 0.68, 0.56]) * r,
        ),
        "left_lower": (
            np.array([[s + 39, 22, -26], [s + 44, 24, -42], [s + 49, 25, -56.0]]),
            np.array([0.6, 0.55, 0.48]) * r,
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
        _spine_point(anatomy, z, dx, -4)
        for z, dx in ((-40, 20 + 0.3 * s), (-90, 16), (-140, 8), (-200, 3), (-280, 2), (-420, 2))
    ]
    tubes: dict[str, Tube] = {
        "aorta": (np.array(arch + down), np.concatenate([a * np.array([1.05, 1.05, 1, 0.98, 0.92, 0.88]), [d * 1.05, d], d * np.array([0.98, 0.95, 0.92, 0.85, 0.75, 0.6])])),
        "brachiocephalic": (np.array([[s - 5, -26, 28], [s - 12, -20, 55], [-26, -8, 78.0]]), np.array([7.0, 6.5, 6.0])),
        "left_carotid": (np.array([[s + 2, -12, 31], [s * 0.5 + 12, -8, 62], [20, -4, 100], [26, 0, 190.0]]), 4.0),
        "right_carotid": (np.array([[-26, -8, 78], [-24, -4, 110], [-26, 0, 190.0]]), 4.0),
        "left_subclavian": (np.array([[s + 12, 6, 31], [s * 0.5 + 22, 10, 62], [30, 8, 88], [60, -8, 100], [110, -10, 88.0]]), 4.8),
        "right_subclavian": (np.array([[-26, -8, 78], [-40, 0, 96], [-70, -10, 98], [-112, -10, 88.0]]), 4.8),
        "trunk": (np.array([[s + 22, -46, -40], [s + 20, -42, -18], [s + 22, -22, -8], [s + 27, -4, -3.0]]), np.array([1.05, 1.05, 1.0, 0.9]) * p),
        "left_pulmonary": (np.array([[s + 27, -4, -3], [s + 37, 10, -3], [s + 46, 22, -14], [s + 51, 28, -34.0]]), np.array([0.85, 0.75, 0.66, 0.5]) * p),
        "right_pulmonary": (np.array([[s + 20, -20, -11], [s + 2, -8, -18], [s - 20, -3, -20], [s - 40, 4, -22], [s - 46, 12, -40.0]]), np.array([0.85, 0.78, 0.74, 0.62, 0.5]) * p),
        "superior_cava": (np.array([[-24 + 0.5 * s, -28, 62], [s - 26, -24, 30], [s - 27, -20, 0], [s - 27, -18, -40.0]]), np.array([8.0, 8.5, 9.5, 10.5])),
        "left_brachiocephalic_vein": (np.array([[40, -22, 78], [16 + 0.5 * s, -36, 60], [s * 0.5 - 10, -38, 50], [s - 24, -28, 42.0]]), 6.5),
        "right_brachiocephalic_vein": (np.array([[-44, -18, 80], [-28 + 0.5 * s, -28, 60.0]]), 7.0),
        "left_jugular": (np.array([[40, -22, 78], [36, -12, 120], [38, -4, 190.0]]), 5.5),
        "right_jugular": (np.array([[-44, -18, 80], [-38, -12, 120], [-40, -4, 190.0]]), 6.0),
        "azygos": (np.array([_spine_point(anatomy, -160, -8, -3), _spine_point(anatomy, -60, -9, -4), _spine_point(anatomy, 4, -10, -5), [s - 20, 20, 14], [s - 26, -6, 14], [s - 27, -18, 6]]), 4.0),
        "inferior_cava": (np.array([[s - 22, -6, low - 4], [0.5 * s - 26, 4, low - 40], [-24, 10, low - 80], [-22, 12, -300], [-20, 14, -420.0]]), np.array([12.0, 12.0, 11.5, 11.0, 10.5])),
    }  # fmt: skip
    for side, name in ((1, "left"), (-1, "right")):
        atrium = np.array([s + 2.0, 6.0, low + 18])
        for level, start, end in (
            ("upper", (14, 0, 4), (34, -6, 14)),
            ("lower", (14, 4, -8), (36, 14, -12)),
        ):
            ends = np.stack([atrium + np.array([side, 1, 1]) * one for one in (start, end)])
            tubes[f"{name}_{level}_vein"] = (ends, np.array([8.0, 6.0]))
    return tubes


def vein_roots(anatomy: Anatomy, side: int) -> Points:
    """Point where the pulmonary veins of one side leave the lung, xyz in mm."""
    return np.array(
        [anatomy.shift_x_mm + 2.0 + side * 36, 6.0, float(anatomy.heart_centre_xyz_mm[2]) + 20.0]
    )


def oesophagus(anatomy: Anatomy) -> Tube:
    """Oesophagus, in front of the spine and left of the midline below."""
    s = anatomy.shift_x_mm
    points = [[2 + s * 0.2, 4, 150], [4 + s * 0.4, 18, 90]] + [
        _spine_point(anatomy, z, dx + s * f, -9)
        for z, dx, f in ((40, 4, 0.7), (0, 4, 0.8), (-50, 2, 0.7))
    ]
    points += [_spine_point(anatomy, -95, 10, -20), _spine_point(anatomy, -130, 26, -34)]
    return (np.array(points), np.array([6.5, 7, 7, 7, 7.5, 8, 8.0]))


def draw_central_tubes(anatomy: Anatomy, lattice: Lattice) -> Fields:
    """Draw the large vessels (`blood`), the lumen of the central airways (`airway`) and the oesophagus (`gullet`).

    Returns:
        Distances (D, H, W), at most 30 mm.
    """
    vessels, airways = great_vessels(anatomy).values(), bronchi(anatomy).values()
    fields = {name: lattice.full(30) for name in ("blood", "airway", "gullet")}
    for field, tubes, margin_mm in zip(
        fields.values(), (vessels, airways, [oesophagus(anatomy)]), (14, 14, 12), strict=True
    ):
        for tube in tubes:
            draw_tube(field, lattice, *tube, margin_mm=margin_mm)
    return fields


def heart_fields(anatomy: Anatomy, x: Field, y: Field, z: Field) -> Fields:
    """Measure the heart: an egg of two ventricles with the atria behind and to the right.

    Returns:
        Distances to the outside (`heart`), the `left_ventricle`, the `right_heart` and the
        `left_atrium`.
    """
    centre = anatomy.heart_centre_xyz_mm + [anatomy.shift_x_mm, 0, 0]
    axes, radii = anatomy.heart_axes, np.array(anatomy.heart_radii_mm)
    atrium_left = ellipsoid(x, y, z, centre + [-16, 36, 20], (33, 19, 23))
    atrium_right = ellipsoid(x, y, z, centre + [-38, 12, 2], (27, 29, 37))
    outside = union(
        union(ellipsoid(x, y, z, centre, radii, axes), atrium_left, 12), atrium_right, 14
    )
    left = ellipsoid(x, y, z, centre + 7 * axes[0] + [9, 9, -2], radii * [0.66, 0.44, 0.44], axes)
    right = ellipsoid(x, y, z, centre + [-10, -13, -2], radii * [0.78, 0.62, 0.5], axes)
    right = np.minimum(maximum(right, 9 - left, outside + 4), atrium_right + 4)
    return {
        "heart": outside,
        "left_ventricle": left,
        "right_heart": right,
        "left_atrium": atrium_left + 3,
    }
