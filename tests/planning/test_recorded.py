"""Recorded compilations for TPUs, and the second reader, which simulates executables and counts.

The reader itself is compared with hand-written programs and hand-written counts.
"""

import dataclasses
import textwrap

import pytest

from tests.support import executable_reader
from tests.support.executable_reader import axes_of, replica_groups, slice_groups
from tests.support.recorded import REPOSITORY, anywhere, names, recorded
from tests.support.tpu_programs import PROGRAMS

MESH = {'a': 4, 'b': 2}
KIB, MIB = 2**10, 2**20


# --- Groups ---------------------------------------------------------------------------------------

ALONG_A = [[0, 2, 4, 6], [1, 3, 5, 7]]
ALONG_B = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ('{{0,1},{2,3},{4,5},{6,7}}', ALONG_B),
        ('[4,2]<=[8]', ALONG_B),
        ('[2,4]<=[4,2]T(1,0)', ALONG_A),
        ('[1,8]<=[8]', [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ('[2,4]<=[2,2,2]T(0,2,1)', [[0, 2, 1, 3], [4, 6, 5, 7]]),
        ("mesh['a'=4,'b'=2] {'a'}", ALONG_A),
        ("mesh['a'=4,'b'=2] {'b'}", ALONG_B),
        ("mesh['a'=4,'b'=2] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        # Devices in another order.
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", ALONG_A),
        # Parts of an axis: 4 is 2 x 2; the outer half, and the inner half.
        ("mesh['a'=4,'b'=2] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=4,'b'=2] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_notations_of_groups(text, expected):
    assert replica_groups(text) == expected


@pytest.mark.parametrize('text', ['{{0,1},{2,x}}', '[4,2]<=[9]', "mesh['a'=4] {'a'} more", 'all'])
def test_unknown_groups_are_rejected(text):
    with pytest.raises((AssertionError, ValueError)):
        replica_groups(text)


@pytest.mark.parametrize(
    ('groups', 'axes'),
    [
        (ALONG_A, ('a',)),
        (ALONG_B, ('b',)),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], ('a', 'b')),
        ([[0, 4], [1, 5]], ('a',)),
        ([[0, 3]], ('a', 'b')),
        ([[0], [1]], ()),
    ],
)
def test_mesh_axes_of_groups(groups, axes):
    assert axes_of(groups, MESH) == axes


def test_notations_of_slices():
    assert slice_groups('"{1,2,3,4}x{0:7}"') == [[1, 2, 3, 4]]
    assert slice_groups('{{100003,300003},{200003,400003}}') == [[1, 3], [2, 4]]
    assert slice_groups('{{100000->200000},{200000->100000}}') == [[1, 2], [2, 1]]
    with pytest.raises(AssertionError, match='places in slices differ'):
        slice_groups('{{100000,200001}}')


# --- Programs written by hand ---------------------------------------------------------------------

ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def counts(entry, *computations, mesh=MESH, slices=1, kernel=''):
    """Returns the counts of a program with these lines in its entry computation."""
    body = textwrap.indent(textwrap.dedent(entry).strip('\n'), '  ')
    others = [textwrap.dedent(computation).strip('\n') for computation in (ADD, *computations)]
    main = f'ENTRY %main (p: f32[256]) -> f32[] {{\n{body}{kernel}\n}}\n'
    text = '\n\n'.join(['HloModule made, num_partitions=8', *others, main])
    return executable_reader.read(text, mesh, slices)


def test_kinds_and_bytes():
    """Bytes are those of the full array of a group; f32[256] is 1 KiB."""
    result = counts(
        """
        %p = f32[256]{0:T(256)} parameter(0)
        %g = f32[1024]{0} all-gather(%p), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
        %r = f32[256]{0} all-reduce(%p), channel_id=2, replica_groups=[4,2]<=[8], to_apply=%add
        %s = f32[64]{0} reduce-scatter(%p), channel_id=3, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
        %t = f32[256]{0} all-to-all(%p), channel_id=4, replica_groups=[1,8]<=[8], dimensions={0}
        %c = f32[256]{0} collective-permute(%p), channel_id=5, source_target_pairs={{0,1},{1,0}}
        %one = f32[256]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
        %self = f32[256]{0} collective-permute(%p), source_target_pairs={{0,0},{5,5}}
        %q = bf16[2,256]{1,0} broadcast(%p)
        %wide = (f32[256]{0}, /*index=1*/bf16[2,256]{1,0}) all-reduce(%p, %q), replica_groups=[4,2]<=[8]
        ROOT %z = f32[256]{0} copy(%p)
        """
    )
    assert result.collectives == {
        ('all-gather', ('a',)): (1, 4 * KIB),
        ('all-reduce', ('b',)): (2, 1 * KIB + 2 * KIB),
        ('reduce-scatter', ('a',)): (1, 1 * KIB),
        ('all-to-all', ('a', 'b')): (1, 8 * KIB),
        ('collective-permute', ('b',)): (1, 2 * KIB),
    }


def test_asynchronous_operations_count_once():
    result = counts(
        """
        %p = f32[256] parameter(0)
        %gs = (f32[256], f32[1024]) all-gather-start(%p), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
        %gd = f32[1024] all-gather-done(%gs)
        %cs = (f32[256], f32[256], u32[]) collective-permute-start(%p), source_target_pairs={{0,2},{2,0}}
        %cd = f32[256] collective-permute-done(%cs)
        %rs = f32[256] all-reduce-start(%p), replica_groups=[4,2]<=[8], to_apply=%add
        %rd = f32[256] all-reduce-done(%rs)
        %ws = ((f32[256]), f32[64], u32[]) async-start(%p), calls=%wrapped
        %wu = ((f32[256]), f32[64], u32[]) async-update(%ws)
        ROOT %wd = f32[64] async-done(%wu)
        """,
        """
        %wrapped (q: f32[256]) -> f32[64] {
          %q = f32[256] parameter(0)
          ROOT %s = f32[64] reduce-scatter(%q), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
        }
        """,
    )
    assert result.collectives == {
        ('all-gather', ('a',)): (1, 4 * KIB),
        ('collective-permute', ('a',)): (1, 4 * KIB),
        ('all-reduce', ('b',)): (1, KIB),
        ('reduce-scatter', ('a',)): (1, KIB),
    }


GATHER = 'all-gather(%i), channel_id=7, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}'
FIRST = 'backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}'
LATER = 'backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}'
CHAIN = (
    f"""
    %begin (i: f32[256]) -> (f32[256], f32[1024], s32[2]) {{
      %i = f32[256] parameter(0)
      %g = f32[1024] {GATHER}, frontend_attributes={{chain_id="0"}}, {FIRST}
      ROOT %s = (f32[256], f32[1024], s32[2]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
    }}
    """,
    f"""
    %beside (i: f32[256], o: f32[1024], f: s32[2]) -> (f32[256], f32[1024], f32[1024], s32[2]) {{
      %i = f32[256] parameter(0)
      %o = f32[1024] parameter(1)
      %f = s32[2] parameter(2)
      %g = f32[1024] {GATHER}, frontend_attributes={{chain_id="0"}}, {LATER}
      ROOT %s = (f32[256], f32[1024], f32[1024], s32[2]) tuple(%i, %o, %g, %f)
    }}
    """,
    f"""
    %end (i: f32[256], o: f32[1024], f: s32[2]) -> f32[1024] {{
      %i = f32[256] parameter(0)
      %o = f32[1024] parameter(1)
      %f = s32[2] parameter(2)
      %g = f32[1024] {GATHER}, frontend_attributes={{chain_id="0"}}, {LATER}
      ROOT %s = f32[1024] custom-call(%i, %o, %g, %f), custom_call_target="AsyncCollectiveDone"
    }}
    """,
)


def chain(end):
    """Returns an asynchronous all-gather that occurs in four fusions, with these endings of their names."""
    return """
        %p_ = f32[256] parameter(0)
        %1_ = (f32[256], f32[1024], s32[2]) fusion(%p_), calls=%begin
        %2_ = (f32[256], f32[1024], f32[1024], s32[2]) fusion(%1_#0, %1_#1, %1_#2), calls=%beside
        %i_ = f32[256] get-tuple-element(%2_), index=0
        %3_ = (f32[256], f32[1024], f32[1024], s32[2]) fusion(%i_, %2_#1, %2_#3), calls=%beside
        %4_ = f32[1024] fusion(%3_#0, %3_#1, %3_#3), calls=%end
        """.replace('_', end)


def test_the_fusions_of_one_collective_count_once():
    assert counts(chain('.x'), *CHAIN).collectives == {('all-gather', ('a',)): (1, 4 * KIB)}


def test_two_collectives_of_one_channel_are_two():
    result = counts(chain('.x') + chain('.y'), *CHAIN)
    assert result.collectives == {('all-gather', ('a',)): (2, 8 * KIB)}


def test_the_middle_of_a_collective_alone_is_rejected():
    with pytest.raises(AssertionError, match='not the first of its fusions'):
        counts(
            """
            %p = f32[256] parameter(0)
            %o = f32[1024] broadcast(%p)
            %f = s32[2] iota()
            ROOT %z = f32[1024] fusion(%p, %o, %f), kind=kCustom, calls=%end
            """,
            *CHAIN,
        )


def test_an_all_reduce_that_is_sliced_at_once_is_a_reduce_scatter():
    fused = """
        %all-reduce-scatter.1 (i: f32[256], j: f32[512]) -> (f32[64], f32[128]) {
          %i = f32[256] parameter(0)
          %j = f32[512] parameter(1)
          %r = (f32[256], f32[512]) all-reduce(%i, %j), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
          %1 = f32[256] get-tuple-element(%r), index=0
          %n = u32[] partition-id()
          %s = f32[64] dynamic-slice(%1, %n), dynamic_slice_sizes={64}
          %t = f32[128] dynamic-slice(%r#1, %n), dynamic_slice_sizes={128}
          ROOT %u = (f32[64], f32[128]) tuple(%s, %t)
        }
        """
    entry = """
        %p = f32[256] parameter(0)
        %q = f32[512] broadcast(%p)
        %f = (f32[64], f32[128]) fusion(%p, %q), kind=kCustom, calls=%all-reduce-scatter.1
        ROOT %z = f32[64] get-tuple-element(%f), index=0
        """
    assert counts(entry, fused).collectives == {('reduce-scatter', ('a',)): (1, 3 * KIB)}
    # The compiler's name for such a fusion and its contents must agree.
    with pytest.raises(AssertionError, match='all-reduce-scatter'):
        counts(entry, fused.replace('tuple(%s, %t)', 'tuple(%s, %t, %1)'))


LOOPS = (
    """
    %less (s: (s32[], f32[256])) -> pred[] {
      %s = (s32[], f32[256]) parameter(0)
      %limit = s32[] constant(7)
      ROOT %c = pred[] compare(%s#0, %limit), direction=LE
    }
    """,
    """
    %plus (i: s32[], j: s32[]) -> s32[] {
      %i = s32[] parameter(0)
      %j = s32[] parameter(1)
      ROOT %k = s32[] add(%i, %j)
    }
    """,
    """
    %inner (s: (s32[], f32[256])) -> (s32[], f32[256]) {
      %s = (s32[], f32[256]) parameter(0)
      %i = s32[] get-tuple-element(%s), index=0
      %two = s32[] constant(2)
      %j = s32[] fusion(%i, %two), kind=kLoop, calls=%plus
      %r = f32[256] all-reduce(%s#1), replica_groups=[4,2]<=[8], to_apply=%add
      ROOT %t = (s32[], f32[256]) tuple(%j, %r)
    }
    """,
    """
    %more (s: (s32[], f32[256])) -> pred[] {
      %s = (s32[], f32[256]) parameter(0)
      %limit = s32[] constant(-3)
      ROOT %c = pred[] compare(%limit, %s#0), direction=NE
    }
    """,
    """
    %outer (s: (s32[], f32[256])) -> (s32[], f32[256]) {
      %s = (s32[], f32[256]) parameter(0)
      %one = s32[] constant(1)
      %start = (s32[], f32[256]) tuple(%one, %s#1)
      %w = (s32[], f32[256]) while(%start), condition=%less, body=%inner
      %x = f32[256] get-tuple-element(%w), index=1
      %g = f32[1024] all-gather(%x), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
      %j = s32[] subtract(%s#0, %one)
      ROOT %t = (s32[], f32[256]) tuple(%j, %x)
    }
    """,
)


def test_loops_in_loops():
    """``for i in 1, 3, 5, 7`` in ``for i in 0, -1, -2``."""
    result = counts(
        """
        %p = f32[256] parameter(0)
        %zero = s32[] constant(0)
        %start = (s32[], f32[256]) tuple(%zero, %p)
        %w = (s32[], f32[256]) while(%start), condition=%more, body=%outer
        ROOT %z = f32[256] get-tuple-element(%w), index=1
        """,
        *LOOPS,
    )
    assert result.collectives == {
        ('all-reduce', ('b',)): (12, 12 * KIB),
        ('all-gather', ('a',)): (3, 12 * KIB),
    }


def test_loops_of_unknown_length():
    """The compiler may know a trip count that depends on an argument; otherwise the loop is rejected."""
    entry = """
        %p = f32[256] parameter(0)
        %n = s32[] parameter(1)
        %start = (s32[], f32[256]) tuple(%n, %p)
        %w = (s32[], f32[256]) while(%start), condition=%less, body=%inner
        ROOT %z = f32[256] get-tuple-element(%w), index=1
        """
    with pytest.raises(AssertionError, match='depends on data'):
        counts(entry, *LOOPS)
    known_loop = entry.replace('body=%inner', 'body=%inner, backend_config={"known_trip_count":{"n":"5"}}')
    assert counts(known_loop, *LOOPS).collectives == {('all-reduce', ('b',)): (5, 5 * KIB)}


BRANCHES = (
    """
    %sends (x: f32[256]) -> f32[256] {
      %x = f32[256] parameter(0)
      %r = f32[256] all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%add
      ROOT %s = f32[256] all-reduce(%r), replica_groups=[4,2]<=[8], to_apply=%add
    }
    """,
    """
    %multiplies (x: f32[256]) -> f32[256] {
      %x = f32[256] parameter(0)
      %m = f32[16,16] bitcast(%x)
      %d = f32[16,16] dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      ROOT %g = f32[384] all-gather(%x), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
    }
    """,
)


def test_the_largest_branch_counts():
    """Collectives count from the branch with 2 KiB in two all-reduces, and matmuls from the other one."""
    entry = """
        %p = f32[256] parameter(0)
        %which = s32[] parameter(1)
        ROOT %z = f32[256] conditional(%which, %p, %p), branch_computations={%sends, %multiplies}
        """
    result = counts(entry, *BRANCHES)
    assert result.collectives == {('all-reduce', ('b',)): (2, 2 * KIB)}
    assert result.flops == 2 * 16**3
    either = 'true_computation=%multiplies, false_computation=%sends'
    assert counts(entry.replace('branch_computations={%sends, %multiplies}', either), *BRANCHES) == result


def test_collectives_across_slices():
    """A send and a recv are one collective; groups of other collectives are within a slice."""
    host = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
    target = '_xla_megascale_target="{1,2}x{0:3}"'
    gather = f'frontend_attributes={{{host},{target},_xla_megascale_transfer_type="ALL_GATHER"}}'
    scatter = f'frontend_attributes={{{host},{target},_xla_megascale_transfer_type="REDUCE_SCATTER"}}'
    entry = f"""
        %p = f32[256] parameter(0)
        %t = token[] after-all()
        %s = (f32[256], u32[], token[]) send(%p, %t), channel_id=1, is_host_transfer=true, {gather}
        %r = (f32[512], u32[], token[]) recv(%t), channel_id=2, is_host_transfer=true, {gather}
        %sd = token[] send-done(%s), channel_id=1, is_host_transfer=true
        %rd = (f32[512], token[]) recv-done(%r), channel_id=2, is_host_transfer=true
        %u = (f32[256], u32[], token[]) send(%p, %t), channel_id=3, is_host_transfer=true, {scatter}
        %v = (f32[128], u32[], token[]) recv(%t), channel_id=4, is_host_transfer=true, {scatter}
        %a = f32[256] all-reduce(%p), replica_groups={{{{0,1,2,3}}}}, to_apply=%add
        ROOT %z = f32[256] copy(%p)
        """
    mesh = {'data': 2, 'fsdp': 4}
    assert counts(entry, mesh=mesh, slices=2).collectives == {
        ('all-gather', ('data',)): (1, 2 * KIB),
        ('reduce-scatter', ('data',)): (1, KIB),
        ('all-reduce', ('fsdp',)): (1, KIB),
    }
    with pytest.raises(AssertionError, match='a transfer to the host'):
        counts(entry.replace('xla_megascale_runtime', 'tf_rendezvous'), mesh=mesh, slices=2)


def test_the_memory_of_the_host():
    """A slice of 1 KiB and a copy of 8 KiB move to the host; a slice of 1 KiB moves from it."""
    entry = """
        %p = f32[256] parameter(0)
        %n = s32[] parameter(1)
        %k = f32[8,256]{1,0:T(8,128)S(5)} custom-call(), custom_call_target="AllocateBuffer"
        %ws = ((f32[8,256]{1,0:S(5)}), f32[8,256]{1,0:S(5)}, u32[]) async-start(%k, %p, %n), calls=%write
        %wd = f32[8,256]{1,0:S(5)} async-done(%ws)
        %rs = ((f32[8,256]{1,0:S(5)}), f32[256], u32[]) dynamic-slice-start(%wd, %n)
        %rd = f32[256] dynamic-slice-done(%rs)
        %all = f32[8,256]{1,0} broadcast(%rd)
        %cs = (f32[8,256]{1,0:S(5)}, f32[8,256]{1,0}, u32[]) copy-start(%all)
        %cd = f32[8,256]{1,0:S(5)} copy-done(%cs)
        %near = (f32[8,256]{1,0:S(1)}, f32[8,256]{1,0}, u32[]) copy-start(%all)
        ROOT %z = f32[256] copy(%rd)
        """
    write = """
        %write (k: f32[8,256], x: f32[256], n: s32[]) -> f32[8,256] {
          %k = f32[8,256]{1,0:S(5)} parameter(0)
          %x = f32[256] parameter(1)
          %n = s32[] parameter(2)
          ROOT %u = f32[8,256]{1,0:S(5)} dynamic-update-slice(%k, %x, %n)
        }
        """
    result = counts(entry, write)
    assert (result.to_host, result.from_host) == (9 * KIB, KIB)
    assert not result.collectives
    with pytest.raises(AssertionError, match='broadcast'):
        counts(entry.replace('%all = f32[8,256]{1,0}', '%all = f32[8,256]{1,0:S(5)}'), write)


@pytest.mark.parametrize(
    ('left', 'right', 'result', 'attributes', 'flops'),
    [
        # A matmul of 8 x 16 and 16 x 32.
        ('[8,16]', '[16,32]', '[8,32]', 'dim_labels=bf_io->bf', 2 * 8 * 16 * 32),
        # One dimension: at both ends one of three positions is padding.
        (
            '[1,10,4]',
            '[3,4,5]',
            '[1,10,5]',
            'window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f',
            2 * 28 * 4 * 5,
        ),
        # Every second position: 10 without padding has 4.
        ('[1,10,1]', '[3,1,1]', '[1,4,1]', 'window={size=3 stride=2}, dim_labels=b0f_0io->b0f', 2 * 12),
        # Dilation holes are not multiplied: 1 0 2 0 3, with a window of three.
        ('[1,3,1]', '[3,1,1]', '[1,3,1]', 'window={size=3 lhs_dilate=2}, dim_labels=b0f_0io->b0f', 2 * 5),
        # Window positions at a distance of two.
        ('[1,5,1]', '[3,1,1]', '[1,1,1]', 'window={size=3 rhs_dilate=2}, dim_labels=b0f_0io->b0f', 2 * 3),
        # The compiler's form of a matmul in two parts: all positions that do not overlap are padding.
        (
            *('[1024,2048,1]', '[2048,2,1024]', '[1024,2,1024]'),
            *('window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_i0o->b0f', 2 * 1024 * 2048 * 2 * 1024),
        ),
        # Two dimensions; the second is not padded.
        (
            *('[2,6,6,3]', '[3,3,3,7]', '[2,6,4,7]'),
            *('window={size=3x3 pad=1_1x0_0}, dim_labels=b01f_01io->b01f', 2 * 2 * 16 * 12 * 3 * 7),
        ),
    ],
)
def test_matmuls(left, right, result, attributes, flops):
    actual = counts(f"""
        %p = f32[256] parameter(0)
        %l = bf16{left} broadcast(%p)
        %r = bf16{right} broadcast(%p)
        ROOT %c = bf16{result} convolution(%l, %r), {attributes}
        """)
    assert actual.flops == flops


def test_kernels_with_metadata_over_several_lines():
    result = counts(
        """
        %p = f32[256] parameter(0)
        %k = f32[256] custom-call(%p), custom_call_target="tpu_custom_call", attributes={kernel_metadata={
        """,
        kernel="""
"note":"%r = f32[8] all-reduce(%p), }",
"other":"x"
}}, backend_config={"flag_configs":[]}
  ROOT %r = f32[256] all-reduce(%k), replica_groups=[4,2]<=[8], to_apply=%add""",
    )
    assert result.collectives == {('all-reduce', ('b',)): (1, KIB)}


@pytest.mark.parametrize(
    'line',
    [
        '%x = f32[256] fancy-reduce(%p)',
        '%x = f32[256] custom-call(%p), custom_call_target="Fancy"',
        '%x = (f32[256], f32[256]) fancy-start(%p)',
        '%x = f32[256] fancy-done(%p)',
        '%x = f99[256] all-reduce(%p), replica_groups=[4,2]<=[8]',
        '%x = f32[256] all-reduce(%p), replica_groups=[2,2]<=[4]',
        '%x = f32[256] all-reduce(%p), replica_groups={}',
    ],
)
def test_unknown_operations_are_rejected(line):
    with pytest.raises((AssertionError, KeyError)):
        counts(f'%p = f32[256] parameter(0)\n{line}\nROOT %z = f32[256] copy(%p)')


# --- Recordings -----------------------------------------------------------------------------------


def test_all_programs_are_recorded():
    assert names() == sorted(PROGRAMS)
    assert len(PROGRAMS) >= 40
    for name, program in PROGRAMS.items():
        recording = recorded(name)
        assert (recording.topology, recording.mesh, recording.slices) == (
            program.topology,
            program.mesh,
            program.slices,
        )


def read(name):
    recording = recorded(name)
    return executable_reader.read(recording.executable, recording.mesh, recording.slices)


@pytest.mark.medium
@pytest.mark.sampled(11)
@pytest.mark.parametrize('name', PROGRAMS)
def test_recordings_are_complete(name):
    """The second reader knows every instruction, and the executable equals the dump."""
    recording, result = recorded(name), read(name)
    assert result.collectives
    assert executable_reader.read(recording.optimized, recording.mesh, recording.slices) == result
    assert str(REPOSITORY) in recording.partitioned
    assert all(recording.tables)
    assert recording.memory['peak_memory_in_bytes'] > 0
    assert bool(result.to_host) == bool(result.from_host) == name.startswith(('offloaded', 'parked'))


# Counts that follow from the programs.
KNOWN = {
    'two_products v5e': {('all-reduce', ('tp',)): (1, 64 * MIB)},
    'gathered v5e': {('all-gather', ('fsdp',)): (3, 3 * 32 * MIB)},
    'nested_loops v5e': {('all-gather', ('fsdp',)): (15, 15 * 8 * MIB)},
    'branches v5e': {('all-gather', ('fsdp',)): (6, 6 * 8 * MIB)},
    'block v5e': {('all-reduce', ('tp',)): (1, 2048 * 4096 * 2)},
    'resharded v5e': {('all-to-all', ('fsdp',)): (1, 32 * MIB)},
    'rolled v5e': {('collective-permute', ('fsdp',)): (1, 4 * 3 * 4096 * 2)},
    'by_hand v5p': {
        ('all-gather', ('b',)): (1, 512 * 2048 * 2),
        ('collective-permute', ('a',)): (1, 2 * 512 * 2048 * 2),
        ('reduce-scatter', ('c',)): (1, 512 * 2048 * 2),
        ('all-to-all', ('b', 'c')): (1, 4 * 256 * 2048 * 2),
        ('all-reduce', ('a', 'c')): (1, 1024 * 512 * 2),
    },
}


@pytest.mark.parametrize('name', KNOWN)
def test_counts_that_follow_from_the_program(name):
    assert read(name).collectives == KNOWN[name]


def test_flops_that_follow_from_the_program():
    """8 layers of 1,024 rows: one matmul forward, half of it recomputed, and two backward."""
    layer = 2 * 2 * 1024 * 2048 * 8192
    assert read('fsdp_saved v5e').flops == 8 * 3 * layer
    assert read('fsdp v5e').flops == 8 * 3.5 * layer
    assert read('fsdp_tp v6e').flops == 8 * 3.5 * layer / 4


def test_transfers_of_recorded_programs():
    """The input of 8 layers, 4,096 rows of 2,048; a state of 4,096 x 8,192 on 8 devices."""
    offloaded, parked = read('offloaded v5e'), read('parked v5e')
    assert offloaded.to_host == offloaded.from_host == 8 * 4096 * 2048 * 2
    assert parked.to_host == parked.from_host == 4096 * 8192 * 2 / 8


@pytest.mark.medium
def test_recordings_name_no_folder_of_the_machine_that_made_them():
    """A recording that is read in another folder contains the paths of that folder."""
    for name in PROGRAMS:
        for value in dataclasses.asdict(recorded(name)).values():
            assert str(REPOSITORY) not in str(anywhere(value))
            assert '/tmp/' not in str(anywhere(value))
