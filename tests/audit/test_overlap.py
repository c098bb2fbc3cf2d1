from gregale.audit import audit
from gregale.audit.overlap import compute_behind

ASYNC = """HloModule jit_step, is_scheduled=true, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  %hidden-start = f32[8,8] all-reduce-start(%x), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%sum
  %first = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %second = f32[8,8] dot(%first, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %hidden-done = f32[8,8] all-reduce-done(%hidden-start)
  %exposed-start = f32[8,8] all-reduce-start(%second), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%sum
  %exposed-done = f32[8,8] all-reduce-done(%exposed-start)
  %plain = f32[8,8] all-reduce(%exposed-done), channel_id=3, replica_groups={{0,1,2,3}}, to_apply=%sum
  ROOT %result = f32[8,8] add(%plain, %hidden-done)
}
"""


def test_compute_between_start_and_end_is_counted():
    assert compute_behind(ASYNC) == {"hidden-start": 2, "exposed-start": 0}


def test_transfers_between_slices_end_where_they_are_received(stored, pod):
    text = stored("tpu_layers")
    found = audit(text, pod((2, 2, 2), slices=2))
    behind = compute_behind(text)
    for collective in found.collectives:
        assert (collective.name in behind) == collective.is_async, collective
    gathers = [behind[each.name] for each in found.collectives if each.kind == "all-gather" and each.is_async]
    assert gathers
    assert min(gathers) > 0, "the compiler gathers the next layer's weights while it multiplies"


def test_transfers_that_need_each_other_hide_nothing(stored):
    assert compute_behind(stored("tpu_across")), "there are transfers"
