from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gatecrash.networks import DenseNetBC, ResNetCifar, load_weights, save_weights, weights
from shared_data import shared_file

Writer = Callable[[Any, Path], Path]


class Small(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, classes)


class Tied(nn.Module):
    """One weight under two names, and a buffer that is a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 4, bias=False)
        self.decode = nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight
        self.register_buffer("part", self.encode.weight.detach()[:2])


def as_zip(content: Any, folder: Path) -> Path:
    torch.save(content, folder / "weights.pth")
    return folder / "weights.pth"


def as_legacy(content: Any, folder: Path) -> Path:
    torch.save(content, folder / "weights.th", _use_new_zipfile_serialization=False)
    return folder / "weights.th"


def as_safetensors(content: Any, folder: Path) -> Path:
    save_file(content, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def as_pickle(content: Any, folder: Path) -> Path:
    (folder / "weights.pt").write_bytes(pickle.dumps(content))
    return folder / "weights.pt"


def as_old_pickle(content: Any, folder: Path) -> Path:
    (folder / "weights.pt").write_bytes(pickle.dumps(content, protocol=0))
    return folder / "weights.pt"


def refusal(model: nn.Module, path: Path) -> str:
    """The one line with which a file is refused; the model must not have changed."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        load_weights(model, path)
    assert_same(model.state_dict(), before)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("write", [as_zip, as_legacy, as_safetensors])
def test_every_format_gives_back_the_weights(write: Writer, tmp_path: Path) -> None:
    source, model = Small(), Small()
    path = write(source.state_dict(), tmp_path)
    assert load_weights(model, path) is model
    assert_same(model.state_dict(), source.state_dict())


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_wrapper_and_a_prefix_are_taken_off(wrapper: str, prefix: str, tmp_path: Path) -> None:
    source, model = Small(), Small()
    state = {prefix + name: tensor for name, tensor in source.state_dict().items()}
    load_weights(model, as_zip({"epoch": 3, wrapper: state}, tmp_path))
    assert_same(model.state_dict(), source.state_dict())


def test_a_prefix_that_the_model_has_too_stays(tmp_path: Path) -> None:
    source, model = nn.DataParallel(Small()), nn.DataParallel(Small())
    load_weights(model, as_zip(source.state_dict(), tmp_path))
    assert_same(model.state_dict(), source.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_the_dtype_of_the_model(dtype: torch.dtype, tmp_path: Path) -> None:
    source, model = Small().to(dtype), Small()
    load_weights(model, as_safetensors(source.state_dict(), tmp_path))
    assert model.fc.weight.dtype == torch.float32
    assert_same(model.state_dict(), source.float().state_dict())


def test_batch_counters_may_be_missing_as_in_old_files(tmp_path: Path) -> None:
    source, model = Small(), Small()
    state = {name: tensor for name, tensor in source.state_dict().items() if "num_batches" not in name}
    load_weights(model, as_legacy(state, tmp_path))
    assert_same(model.state_dict(), source.state_dict())


def test_what_does_not_fit_is_counted_and_the_first_three_are_named(tmp_path: Path) -> None:
    state = Small(classes=5).state_dict()
    state["head.weight"] = state.pop("bn1.bias")
    path = as_zip(state, tmp_path)
    assert refusal(Small(), path) == (
        f"weights {path} do not fit Small: missing bn1.bias; unexpected head.weight; "
        "fc.weight has shape (5, 4), expected (3, 4); and 1 more"
    )


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    state = Small().state_dict()
    state["fc.bias"] = torch.zeros(3, dtype=torch.int8)
    assert refusal(Small(), as_zip(state, tmp_path)).endswith(
        "do not fit Small: fc.bias is int8, expected a float type"
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_first_tensor_that_is_not_finite_is_named(value: float, tmp_path: Path) -> None:
    source = Small()
    for tensor in (source.fc.weight, source.fc.bias):
        tensor.data.view(-1)[-1] = value
    path = as_zip(source.state_dict(), tmp_path)
    assert refusal(Small(), path) == f"weights {path} must be finite, got NaN or inf in fc.weight"


@pytest.mark.parametrize("name", ["none.safetensors", "none.pth"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    assert refusal(Small(), tmp_path / name) == f"cannot read weights {tmp_path / name}: No such file or directory"


def test_an_unknown_suffix_lists_the_known_ones(tmp_path: Path) -> None:
    expected = "weights must end in one of .safetensors, .pth, .pt, .th, got 'weights.h5'"
    assert refusal(Small(), tmp_path / "weights.h5") == expected


@pytest.mark.parametrize("write", [as_zip, as_legacy, as_safetensors])
def test_a_file_cut_anywhere_is_refused_as_truncated(write: Writer, tmp_path: Path) -> None:
    path = write(Small().state_dict(), tmp_path)
    whole = path.read_bytes()
    for length in [0, 1, 10, *range(50, len(whole), 53), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert "truncated" in refusal(Small(), path), length


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_web_page_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"weights{suffix}"
    path.write_text("<!DOCTYPE html><html><body>404</body></html>")
    assert "fetch the file again" in refusal(Small(), path)


class Bomb:
    """Unpickled without care, it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, (str(self.target), "w")


@pytest.mark.parametrize("write", [as_zip, as_legacy, as_pickle, as_old_pickle])
def test_a_file_that_holds_code_is_refused_and_the_code_is_not_run(
    write: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "made"
    pickle.loads(pickle.dumps(Bomb(target))).close()
    assert target.exists(), "the bomb must work for the test to mean anything"
    target.unlink()

    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = write({"fc.weight": Bomb(target)}, tmp_path)
    assert refusal(Small(), path) == (
        f"weights {path} refused: the file holds code (io.open), which loading it would run; "
        "have its author save model.state_dict() as safetensors"
    )
    assert not target.exists()


def test_a_pickled_module_is_code(tmp_path: Path) -> None:
    path = as_zip(nn.Linear(2, 2), tmp_path)
    assert "refused: the file holds code (torch.nn.modules.linear.Linear)" in refusal(Small(), path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(2)], "must hold a state dict, got list"),
        ({"epoch": 3}, "must hold named tensors only, got int as 'epoch'"),
        ({0: torch.zeros(2)}, "must hold named tensors only, got Tensor as 0"),
    ],
)
def test_a_file_without_a_state_dict_says_what_it_holds(content: object, message: str, tmp_path: Path) -> None:
    assert refusal(Small(), as_zip(content, tmp_path)).endswith(message)


def test_a_wrapper_that_holds_itself_is_refused(tmp_path: Path) -> None:
    content: dict[str, Any] = {}
    content["model"] = content
    assert refusal(Small(), as_zip(content, tmp_path)).endswith("got dict as 'model'")


def test_saved_weights_come_back(tmp_path: Path) -> None:
    source, model = Small(), Small()
    source.fc.weight.data = source.fc.weight.data.t().contiguous().t()
    save_weights(source, tmp_path / "weights.safetensors")
    load_weights(model, tmp_path / "weights.safetensors")
    assert_same(model.state_dict(), source.state_dict())
    assert [file.name for file in tmp_path.iterdir()] == ["weights.safetensors"]


def test_shared_tensors_are_saved_under_every_name_and_stay_shared(tmp_path: Path) -> None:
    source, model = Tied(), Tied()
    save_weights(source, tmp_path / "weights.safetensors")
    assert load_file(tmp_path / "weights.safetensors").keys() == {"encode.weight", "decode.weight", "part"}
    load_weights(model, tmp_path / "weights.safetensors")
    assert_same(model.state_dict(), source.state_dict())
    assert model.decode.weight is model.encode.weight


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, path = Small(), tmp_path / "weights.safetensors"
    save_weights(old, path)

    def full_disk(_tensors: dict[str, Tensor], file: Path, **_options: object) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "save_file", full_disk)
    with pytest.raises(OSError, match=r"No space left on device: .*/weights.safetensors"):
        save_weights(Small(), path)
    assert_same(load_weights(Small(), path).state_dict(), old.state_dict())
    assert [file.name for file in tmp_path.iterdir()] == ["weights.safetensors"]


def test_saving_names_a_wrong_suffix_and_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"weights are saved as .safetensors, got 'weights.pth'"):
        save_weights(Small(), tmp_path / "weights.pth")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"File exists: .*file'$"):
        save_weights(Small(), tmp_path / "file" / "weights.safetensors")


@pytest.mark.parametrize(
    ("build", "name", "linear"),
    [(DenseNetBC, "densenet_bc_100_12_cifar10.pth", "fc"), (ResNetCifar, "resnet20_cifar10.th", "linear")],
)
def test_the_shared_checkpoints_load_and_survive_safetensors(
    build: Callable[[], nn.Module], name: str, linear: str, tmp_path: Path
) -> None:
    path = shared_file(f"weights/{name}")
    model = load_weights(build(), path)
    stored = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    for key, tensor in stored.items():
        assert torch.equal(model.state_dict()[key.removeprefix("module.")], tensor), key
    assert f"{linear}.weight" in model.state_dict()
    save_weights(model, tmp_path / "weights.safetensors")
    assert_same(load_weights(build(), tmp_path / "weights.safetensors").state_dict(), model.state_dict())
