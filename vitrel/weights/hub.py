"""Downloads of pretrained weights: without the network, weights in the cache are used, or an error says at once what to do.

Left alone, huggingface_hub tries for about a minute to reach the network, once for every name that the file may have.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch
from urllib.error import URLError
from urllib.parse import urlparse

from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import get_session

SECONDS = 5.0  # after which the hub counts as out of reach


@contextmanager
def downloads(name: str) -> Iterator[None]:
    """Return a context in which timm, called in it, loads pretrained weights from its cache or the network.

    A request first tries whether the hub answers. If not, huggingface_hub is offline in the context, so that timm reads its
    cache and does not try again and again.

    Args:
        name: of the model, for the message.

    Raises:
        ConnectionError: the weights are not in the cache and cannot be downloaded; the message says what to do.
    """
    try:
        # weights that are in the cache need no retries, and without the network there is nothing to retry
        with patch.object(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE or not _reached()):
            yield
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, URLError):
        why = f"{urlparse(constants.ENDPOINT).hostname} cannot be reached: connect to the network"
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE forbids to download them: unset it"
        raise ConnectionError(
            f"the weights of {name} are not in the cache {constants.HF_HUB_CACHE}, and {why}, or give a file with the weights "
            "(--weights FILE, in Python vitrel.load)"
        ) from None


def _reached() -> bool:
    """Return whether the hub answers within SECONDS."""
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # of several libraries: names that do not resolve, proxies, certificates, timeouts
        return False
    return True
