"""Which colour does a block get? One for each group of devices, told apart by colour-blind readers too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scalax.visualize._blocks import Blocks

# Paul Tol, "Colour Schemes" (SRON technical note SRON/EPS/TN/09-002): the scheme "light", which is made to
# be written upon, in an order that keeps neighbours apart; and of "iridescent", a scale, the part that is
# neither white nor black.
_FEW = ('#77AADD', '#EE8866', '#44BB99', '#FFAABB', '#EEDD88', '#99DDFF', '#BBCC33', '#AAAA00')
_SCALE = (
    *('#EAF0B5', '#DDECBF', '#D0E7CA', '#C2E3D2', '#B5DDD8', '#A8D8DC', '#9BD2E1', '#8DCBE4', '#81C4E7'),
    *('#7BBCE7', '#7EB2E4', '#88A5DD', '#9398D2', '#9B8AC4', '#9D7DB2', '#9A709E', '#906388', '#805770'),
)
_EVERYBODY = '#DDDDDD'
_BLACK, _WHITE = '#000000', '#FFFFFF'


def colors_of(blocks: Blocks, groups: Iterable[tuple[int, ...]]) -> Mapping[tuple[int, ...], str]:
    """A colour for each of some groups of devices.

    Groups take colours in the order of their first devices in the mesh, so that on one mesh a device
    looks the same however arrays are cut. Many groups share a scale.

    Args:
        blocks: of one array.
        groups: those that hold the blocks to be drawn.
    """
    place = {device: number for number, device in enumerate(blocks.devices)}
    distinct = dict.fromkeys(groups)
    parts = [group for group in distinct if len(group) < len(place)]
    ordered = sorted(parts, key=lambda group: [place[device] for device in group])
    colors = dict(zip(ordered, told_apart(len(ordered)), strict=True))
    return {**dict.fromkeys(distinct, _EVERYBODY), **colors}


def told_apart(count: int) -> list[str]:
    """So many colours; of many, neighbours are alike.

    Example:
        >>> told_apart(2), len(set(told_apart(100)))
        (['#77AADD', '#EE8866'], 100)
    """
    if count <= len(_FEW):
        return list(_FEW[:count])
    return [scaled(number / (count - 1)) for number in range(count)]


def scaled(fraction: float) -> str:
    """The colour at a place of the scale, from 0 to 1.

    Example:
        >>> scaled(0), scaled(0.5), scaled(1)
        ('#EAF0B5', '#7EC0E7', '#805770')
    """
    exact = fraction * (len(_SCALE) - 1)
    lower = min(int(exact), len(_SCALE) - 2)
    pairs = zip(_parts(_SCALE[lower]), _parts(_SCALE[lower + 1]), strict=True)
    return '#' + ''.join(f'{round(one + (other - one) * (exact - lower)):02X}' for one, other in pairs)


def ink(background: str) -> str:
    """Black or white, whichever reads better on a colour (at least 4.5 to 1, as WCAG 2 asks)."""
    return max(_BLACK, _WHITE, key=lambda text: contrast(text, background))


def contrast(one: str, other: str) -> float:
    """The contrast of two colours as WCAG 2 defines it, from 1 to 21."""
    darker, lighter = sorted(map(_luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(text: str) -> float:
    linear = [
        part / 255 / 12.92 if part / 255 <= 0.04045 else ((part / 255 + 0.055) / 1.055) ** 2.4
        for part in _parts(text)
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _parts(text: str) -> list[int]:
    return [int(text[start : start + 2], 16) for start in (1, 3, 5)]
