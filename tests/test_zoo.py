"""The networks of `zoo/`: whole, with a card, and as good as it says."""

from pathlib import Path

import pytest
import torch

from gatecrash import Encoder
from gatecrash.audit.models import bundled, load_model
from shared_data import cifar10_test, gtsrb_test

ZOO = Path(__file__).resolve().parents[1] / "zoo"
FOLDERS = sorted(path for path in ZOO.iterdir() if path.is_dir())
MANY = 40 * 2**20


def encoder_of(folder: Path) -> Encoder:
    """The network of a folder with its normalisation; the hash of its weights is compared."""
    about = bundled(folder)
    return Encoder(
        load_model(about.model_copy(update={"name": f"bundle:{folder}"}), ZOO).eval(), None, about.mean, about.std
    )


def test_there_is_a_network() -> None:
    assert FOLDERS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_network_loads_and_gives_finite_logits(folder: Path) -> None:
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = encoder_of(folder)(x)
    assert isinstance(logits, torch.Tensor)
    assert logits.isfinite().all()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_network_has_a_row_on_the_page(folder: Path) -> None:
    assert f"| `{folder.name}` |" in (ZOO / "README.md").read_text(encoding="utf-8")


def test_no_file_is_too_large_to_carry() -> None:
    sizes = [path.stat().st_size for path in ZOO.rglob("*") if path.is_file()]
    assert max(sizes) <= 10 * 2**20
    assert sum(sizes) <= MANY


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_network_is_as_accurate_as_its_row_says(folder: Path) -> None:
    x, y = {"cifar10": cifar10_test, "gtsrb": gtsrb_test}[folder.name.partition("-")[0]](300)
    row = next(
        line for line in (ZOO / "README.md").read_text(encoding="utf-8").splitlines() if f"`{folder.name}`" in line
    )
    said = float(row.split("|")[5])
    with torch.no_grad():
        logits = encoder_of(folder)(x)
    assert isinstance(logits, torch.Tensor)
    assert abs(float((logits.argmax(dim=1) == y).float().mean()) - said) < 0.05
