import os

from holdfast import _process as forks


class Holder:
    def __init__(self) -> None:
        self.is_forgotten = False
        forks.forget_in_child(self)

    def forget_parent(self) -> None:
        self.is_forgotten = True


def in_child(ask) -> bool:
    """What ``ask`` returns in a forked child."""
    child = os.fork()
    if child == 0:
        os._exit(0 if ask() else 1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def test_a_child_forgets_what_objects_hold_and_its_parent_does_not():
    holder = Holder()
    assert in_child(lambda: holder.is_forgotten)
    assert not holder.is_forgotten


def test_a_child_resets_what_modules_hold(monkeypatch):
    monkeypatch.setattr(forks, "_resets", [])
    calls = []
    forks.reset_in_child(lambda: calls.append("reset"))
    assert in_child(lambda: calls == ["reset"])
    assert calls == []


def test_an_object_that_is_gone_is_not_asked():
    Holder()
    assert in_child(lambda: True)
