"""Memory against seconds: what the points of alternatives are."""

import xml.etree.ElementTree as ET

from scalax._report.memory_seconds import Alternative, memory_against_seconds

GIB = 2**30
EVERY = [
    Alternative('best', 5 * GIB, 0.5, 0.75, True, True, 'plan-1'),
    Alternative('too large', 20 * GIB, 0.25, 0.5, False, target='plan-2'),
    Alternative('slow', 4 * GIB, 1.0, 1.0),
]


def drawn(every, limit):
    return ET.fromstring(f'<div>{memory_against_seconds(every, limit)}</div>')


def test_without_alternatives_there_is_no_picture():
    assert memory_against_seconds([], 16 * GIB) == ''


def test_points():
    picture = drawn(EVERY, 16 * GIB)
    points = picture.findall('.//{*}circle')
    assert [each.get('class') for each in points] == ['point good', 'point bad', 'point']
    assert [each.findtext('{*}title') for each in points] == [
        'best: 5.0 GiB, 500 to 750 ms',
        'too large: 20.0 GiB, 250 to 500 ms',
        'slow: 4.0 GiB, 1,000 to 1,000 ms',
    ]
    assert [each.get('href') for each in picture.findall('.//{*}a')] == ['#plan-1', '#plan-2']


def test_the_limit_is_a_line_where_it_leaves_room():
    assert drawn(EVERY, 16 * GIB).find('.//*[@class="limit"]') is not None
    far = drawn(EVERY, 95 * GIB)
    assert far.find('.//*[@class="limit"]') is None
    assert 'memory of a device, GiB; the limit is 95.0 GiB' in ''.join(far.itertext())
    assert 'limit' not in ''.join(drawn(EVERY, None).itertext())
    assert 'Dashed: the limit.' in ''.join(drawn(EVERY, 16 * GIB).itertext())
