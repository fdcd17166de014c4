from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from objckpt.format.fqn import to_fqn

key = st.one_of(
    st.text(alphabet="a./%()0\x00é", max_size=4), st.integers(), st.booleans(), st.none(), st.binary(max_size=2)
)
paths = st.lists(key, min_size=1, max_size=4).map(tuple)


@given(paths, paths)
def test_different_paths_have_different_names(a: tuple[object, ...], b: tuple[object, ...]) -> None:
    assert (to_fqn(a) == to_fqn(b)) == (list(map(repr, a)) == list(map(repr, b)))


def test_names_stay_readable() -> None:
    assert to_fqn(("model", "layers.0.weight")) == "model/layers.0.weight"
    assert to_fqn(("optim", "state", 0, "exp_avg")) == "optim/state/%(0)/exp_avg"
    assert len({to_fqn(p) for p in [("a.b",), ("a", "b"), ("a/b",)]}) == 3
