from __future__ import annotations

import io
import re
import stat
import sys
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError

from gatecrash import progress as bars
from gatecrash.files import replacing, write_text
from gatecrash.progress import progress, tracked
from gatecrash.registry import Registry

# Registry


@pytest.fixture
def drinks() -> Registry[int]:
    registry: Registry[int] = Registry("drink")
    registry.register("water")(1)
    registry.register("coffee")(2)
    registry.register("beer")(3)
    return registry


def test_a_registry_gives_what_was_entered(drinks: Registry[int]) -> None:
    assert [drinks[name] for name in ("coffee", "water", "beer")] == [2, 1, 3]
    assert list(drinks) == ["water", "coffee", "beer"]
    assert len(drinks) == 3
    assert "beer" in drinks
    assert "wine" not in drinks


def test_registering_leaves_what_it_decorates_alone(drinks: Registry[int]) -> None:
    entry = object()
    registry: Registry[object] = Registry("thing")
    assert registry.register("a")(entry) is entry
    assert registry["a"] is entry


def test_an_unknown_name_is_answered_with_the_nearest_and_the_list(drinks: Registry[int]) -> None:
    message = "unknown drink 'cofee'; did you mean 'coffee'? known: water, coffee, beer"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        drinks["cofee"]


def test_a_name_like_no_other_is_answered_with_the_list_alone(drinks: Registry[int]) -> None:
    with pytest.raises(ValueError, match=r"^unknown drink 'xyz'; known: water, coffee, beer$"):
        drinks["xyz"]


def test_a_name_is_taken_once_and_stays_its_first_owners(drinks: Registry[int]) -> None:
    with pytest.raises(ValueError, match=r"^drink 'water' is registered already$"):
        drinks.register("water")(9)
    assert drinks["water"] == 1


# Files


def test_a_file_is_replaced_when_the_block_ends_well(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")
    with replacing(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_of_the_old_file_keeps_the_whole_of_it(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")
    with path.open() as reader:
        write_text(path, "new")
        assert reader.read() == "old"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_file_is_left_as_it_was_when_the_block_raises(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "results.json"
    path.write_text("old")
    with pytest.raises(error), replacing(path) as draft:
        draft.write_text("half of the n")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_no_file_appears_when_the_block_raises(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "new.json") as draft:
        draft.write_text(str(1 / 0))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_over_when_the_place_cannot_be_taken(tmp_path: Path) -> None:
    taken = tmp_path / "folder"
    taken.mkdir()
    with pytest.raises(OSError, match="folder"), replacing(taken) as draft:
        draft.write_text("new")
    assert list(tmp_path.iterdir()) == [taken]


@pytest.mark.parametrize(
    ("error", "number", "said"),
    [
        (OSError(28, "No space left on device"), 28, "No space left on device"),
        (SafetensorError("Error while serializing: I/O error: … (os error 28)"), 28, "No space left on device"),
        (SafetensorError("another\nmistake"), 5, "another mistake"),
    ],
)
def test_what_cannot_be_written_is_an_error_of_the_system_that_names_the_file(
    tmp_path: Path, error: Exception, number: int, said: str
) -> None:
    path = tmp_path / "weights.safetensors"
    with pytest.raises(OSError, match=said) as caught, replacing(path):
        raise error
    assert (caught.value.errno, caught.value.strerror, caught.value.filename) == (number, said, str(path))
    assert list(tmp_path.iterdir()) == []


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with replacing(path) as first, replacing(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


def test_folders_on_the_way_are_made(tmp_path: Path) -> None:
    write_text(str(tmp_path / "a" / "b" / "c.txt"), "größer")
    assert (tmp_path / "a" / "b" / "c.txt").read_bytes() == "größer".encode()


def test_a_written_file_can_be_read_by_others(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "open")
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o644


def test_a_writer_that_looks_at_the_suffix_finds_it(tmp_path: Path) -> None:
    with replacing(tmp_path / "labels.npz") as draft:
        np.savez(draft, y=np.arange(3))
    assert np.load(tmp_path / "labels.npz")["y"].tolist() == [0, 1, 2]


# Progress


class Terminal(io.StringIO):
    """A terminal that remembers what was written to it; `redirect_stderr(terminal)` makes it standard error."""

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        """What was written, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue())

    @property
    def displays(self) -> int:
        """How often a display was started: each hides the cursor once."""
        return self.text.count("\x1b[?25l")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal on which bars appear at once; what an earlier test left on display is not on it."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(bars, "PATIENCE", 0)
    bars._shown.set(None)
    return Terminal()


def test_nothing_is_written_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bars, "PATIENCE", 0)
    with progress("outer", 2) as bar:
        assert list(tracked(range(3), "inner")) == [0, 1, 2]
        bar.advance(2, "a note")
    assert bar.done == 2
    assert capfd.readouterr() == ("", "")


def test_short_work_stays_quiet(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "PATIENCE", 3600)
    with redirect_stderr(terminal):
        assert list(tracked(range(3), "working")) == [0, 1, 2]
    assert terminal.text == ""


def test_a_bar_appears_late_with_the_work_done_before(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "PATIENCE", 3600)
    with redirect_stderr(terminal), progress("working", 9) as bar:
        bar.advance(4)
        assert terminal.text == ""
        monkeypatch.setattr(bars, "PATIENCE", 0)
        bar.advance()
        assert re.search(r"working .* 5/9", terminal.text)


def test_a_bar_counts_the_items_it_passes_on(terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        assert list(tracked("abc", "reading")) == ["a", "b", "c"]
    assert re.search(r"reading .* 3/3", terminal.text)


def test_a_total_may_be_given_for_a_stream_or_be_unknown(terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        assert list(tracked(iter("ab"), "stream", total=2)) == ["a", "b"]
        assert list(tracked(iter("ab"), "river")) == ["a", "b"]
    assert re.search(r"stream .* 2/2", terminal.text)
    assert re.search(r"river .* 2/\?", terminal.text)


def test_a_note_stands_behind_the_title(terminal: Terminal) -> None:
    with redirect_stderr(terminal), progress("training", 2) as bar:
        bar.advance(1, "loss 0.25")
        bar.advance(1, "loss 0.125")
    assert re.search(r"training loss 0\.125 .* 2/2", terminal.text)


def test_a_bar_is_taken_away_and_the_terminal_given_back(terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        for _ in tracked(range(2), "working"):
            pass
        assert sys.stderr is terminal
    assert terminal.text.count("\x1b[?25h") == terminal.displays == 1  # the cursor is back
    assert terminal.text.endswith("\x1b[1A\x1b[2K")  # up one line, and that line wiped


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_a_long_note_gives_way_to_the_bar_the_count_and_the_time_left(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    note = "2/6 loss 3.57, accuracy 0.412, attack success 0.25, outlier attack gain 0.0312, loss in 2.3, loss out 2.41"
    with redirect_stderr(terminal), progress("aloe", 2820) as bar:
        bar.advance(47, note)
    lines = re.split(r"[\r\n]+", terminal.text.replace("\x1b[2K", ""))
    (line,) = {line.rstrip() for line in lines if "aloe 2/6 l" in line}
    assert line.startswith("aloe 2/6 l") and len(line) <= columns
    bar = 5 if columns < 100 else 20
    assert re.search(rf" ━{{{bar}}} +47/2820 -:--:--$", line)
    assert ("…" in line) == (columns < 200)
    assert ("attack success 0.25" in line) == (columns >= 80)


def test_nested_bars_share_one_display(terminal: Terminal) -> None:
    with redirect_stderr(terminal), progress("outer", 2) as outer:
        outer.advance()
        with progress("inner", 5) as inner:
            inner.advance(3)
        inner_gone = len(terminal.text)
        outer.advance()
    assert terminal.displays == 1
    assert re.search(r"outer[^\n]* 1/2[^\n]*\n[^\n]*inner", terminal.text)
    assert re.search(r"outer[^\n]* 2/2", terminal.text[inner_gone:])
    assert "inner" not in terminal.text[inner_gone:]


def test_a_bar_closes_when_its_work_raises_and_the_next_one_appears(terminal: Terminal) -> None:
    with redirect_stderr(terminal):
        with pytest.raises(ZeroDivisionError), progress("failing", 2) as bar:
            bar.advance()
            bar.advance(1 // 0)
        assert sys.stderr is terminal
        assert list(tracked(range(2), "next")) == [0, 1]
    assert re.search(r"next .* 2/2", terminal.text)
    assert terminal.displays == 2


def test_standard_output_stays_standard_output_under_a_bar(
    terminal: Terminal, capsys: pytest.CaptureFixture[str]
) -> None:
    with redirect_stderr(terminal), progress("working", 1) as bar:
        bar.advance()
        sys.stdout.write("a result\n")
    assert capsys.readouterr().out == "a result\n"
    assert "a result" not in terminal.text


@pytest.mark.parametrize("title", ["reading cifar10[train]", "reading folder:/a[/b]"])
def test_brackets_in_a_title_are_shown(terminal: Terminal, title: str) -> None:
    with redirect_stderr(terminal):
        assert list(tracked(range(2), title)) == [0, 1]
    assert title in terminal.text


def test_an_outer_bar_outlives_the_inner_one_that_appeared_first(terminal: Terminal) -> None:
    with redirect_stderr(terminal), progress("outer", 3) as outer:
        with progress("inner", 2) as inner:
            inner.advance()
            outer.advance()
        inner_gone = len(terminal.text)
        outer.advance()
    assert re.search(r"outer[^\n]* 2/3", terminal.text[inner_gone:])
