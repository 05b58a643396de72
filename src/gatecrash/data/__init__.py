"""Sources of images: what the package carries, what it draws, the user's own files and the published data sets."""

# These modules fill the table of sources, in the order in which a listing shows them.
from gatecrash.data import builtin, files, published  # noqa: F401
from gatecrash.data.embedded import FASHION_CLASSES, fashion, fundus
from gatecrash.data.image_set import ImageSet, fingerprint
from gatecrash.data.sources import SOURCES, Source, describe_sources, load_source

__all__ = [
    "FASHION_CLASSES",
    "SOURCES",
    "ImageSet",
    "Source",
    "describe_sources",
    "fashion",
    "fingerprint",
    "fundus",
    "load_source",
]
