"""What stays after a save, against the policy in plain words."""

from hypothesis import given
from hypothesis import strategies as st

from gregale.checkpoint.manifest import (
    MANIFEST,
    CheckpointConfig,
    committed_steps,
    folder_name,
    superfluous,
    without_manifest,
)

STEPS = st.sets(st.integers(0, 60), min_size=1)


@given(steps=STEPS, data=st.data(), last=st.integers(1, 5), every=st.none() | st.integers(1, 20))
def test_keeps_exactly_the_newest_and_the_milestones(steps, data, last, every):
    saved = data.draw(st.sampled_from(sorted(steps)))
    deleted = superfluous(sorted(steps), saved, CheckpointConfig(keep_last=last, keep_every=every))
    assert saved not in deleted
    for step in steps:
        newer = sum(step < other <= saved for other in steps)
        is_milestone = every is not None and step % every == 0
        assert (step in deleted) == (step > saved or (newer >= last and not is_milestone))


def test_what_has_a_whole_name_and_a_manifest_counts(tmp_path):
    for name in ("step-00000007", "step-00000012.partial", "step-123456789", "step-7", "else"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).touch()
    (tmp_path / "step-00000003").mkdir()
    assert committed_steps(tmp_path) == [7, 123456789]
    assert folder_name(7) == "step-00000007"
    assert without_manifest(tmp_path) == ["step-00000003"]
    assert committed_steps(tmp_path / "absent") == []
    assert without_manifest(tmp_path / "absent") == []
