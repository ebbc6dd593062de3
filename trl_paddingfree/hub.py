"""Whether what is asked for by a name can be had, from the hub or a file. Imports little: commands answer at once."""

import re
from pathlib import Path
from socket import create_connection
from urllib.parse import urlsplit
from urllib.request import getproxies

_PATIENCE = 10  # seconds until a hub that does not answer cannot be reached


def refuse_unreachable(name: str, what: str, revision: str | None = None) -> None:
    """
    Refuse a model that is no folder here, not in the cache of the hub, and cannot be asked for, as without a network:
    `what` names it. The hub's own client tries again for half a minute for each file, and then names no model.
    """
    from huggingface_hub import try_to_load_from_cache

    if _is_on_hub(name, what):
        files = ("config.json", "adapter_config.json")
        if not any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files):
            _refuse_unless_reached(what)


def refuse_unreachable_data(name: str, what: str) -> None:
    """The same of a dataset, for which the hub's client tries again for a minute."""
    from datasets import config
    from huggingface_hub.constants import HF_HUB_CACHE

    if _is_on_hub(name, what):
        owner = name.rpartition("/")[0]
        # What `datasets` has prepared has the name in a spelling of its own
        prepared = Path(config.HF_DATASETS_CACHE).glob(f"{owner}___*" if owner else f"{name}*")
        if not any((Path(HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}").exists(), *prepared)):
            _refuse_unless_reached(what)


def _is_on_hub(name: str, what: str) -> bool:
    """Whether a name is one of the hub, and of nothing here. Refuses one that can be neither."""
    if Path(name).exists():
        return False
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise OSError(f"{what} is not a file or folder here: is it misspelt?")
    return True


def _refuse_unless_reached(what: str) -> None:
    """Refuse what is not here if the hub cannot be asked for it."""
    from huggingface_hub import constants

    reason = "the hub is switched off (`HF_HUB_OFFLINE`)" if constants.HF_HUB_OFFLINE else ""
    address = urlsplit(constants.ENDPOINT)
    if not reason and not getproxies():  # a proxy may reach what we cannot
        try:
            port = address.port or (80 if address.scheme == "http" else 443)
            create_connection((address.hostname or "", port), timeout=_PATIENCE).close()
        except OSError as error:
            reason = f"{address.hostname} cannot be reached ({error})"
    if reason:
        raise OSError(f"{what} is not a file or folder here, nor in the cache of the hub, and {reason}.")


def why_unreadable(file: Path) -> str:
    """Why the tensors of a safetensors file cannot be loaded, as its header tells; empty if they can."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            return ""
    except (OSError, SafetensorError) as error:
        return f"{type(error).__name__}: {error}"
