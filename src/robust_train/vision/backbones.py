"""timm backbones by name: built, checked, with pretrained or local weights."""

from __future__ import annotations

import difflib
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from robust_train.config.extras import require
from robust_train.errors import ConfigError
from robust_train.vision.weights import load_weights

_PROBE_SECONDS = 10.0
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def build_backbone(cfg: Any, num_classes: int) -> nn.Module:
    """The timm model ``cfg.backbone`` for square RGB images of ``cfg.image_size`` pixels.

    Args:
        cfg: a :class:`~robust_train.config.schema.BackboneConfig`. ``weights`` goes before
            ``pretrained``.
        num_classes: outputs of the classifier; 0 for pooled features.

    Raises:
        ConfigError: no such backbone, it cannot take such images, or its weights cannot be had.
    """
    timm = require("timm", f"model={cfg.name}")
    published = _published(timm, cfg.backbone)
    options: dict[str, Any] = {"num_classes": num_classes, "drop_rate": cfg.dropout}
    if published.fixed_input_size:
        options["img_size"] = cfg.image_size
    is_fetched = cfg.pretrained and cfg.weights is None
    if is_fetched and not published.has_weights:
        raise ConfigError(
            f"model.backbone={cfg.backbone}: timm has no pretrained weights for it; "
            "use model.weights=<file> or model.pretrained=false"
        )
    with _one_line_errors(cfg):
        if is_fetched:
            _check_hub(cfg.backbone, published.hf_hub_id)
        model: nn.Module = timm.create_model(cfg.backbone, pretrained=is_fetched, **options)
    _check_patches(cfg, model)
    if cfg.weights is not None:
        load_weights(model, Path(cfg.weights).expanduser(), heads=classifier_names(model))
    return model


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the classifier's modules in a timm model, e.g. ``("head.fc",)``."""
    names: Any = model.pretrained_cfg["classifier"]  # type: ignore[index]
    return (names,) if isinstance(names, str) else tuple(names)


def _published(timm: Any, backbone: str) -> Any:
    """What timm knows of a backbone without building it."""
    name = backbone.partition(".")[0]
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; close are {', '.join(close)}" if close else ""
        raise ConfigError(
            f"model.backbone={backbone}: timm has no such model{hint}; "
            "timm.list_models() lists all of them"
        )
    try:
        return timm.get_pretrained_cfg(backbone)
    except RuntimeError as error:
        tags = timm.list_pretrained(name + ".*")
        raise ConfigError(
            f"model.backbone={backbone}: no such pretrained variant; timm has {', '.join(tags)}"
        ) from error


@contextmanager
def _one_line_errors(cfg: Any) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model.backbone={cfg.backbone}: its pretrained weights could not be fetched "
            f"({reason}); use model.weights=<file> or model.pretrained=false"
        ) from error
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"model.backbone={cfg.backbone}, model.image_size={cfg.image_size}: "
            f"timm cannot build it ({reason})"
        ) from error


def _check_patches(cfg: Any, model: nn.Module) -> None:
    """A ViT on images that its patches do not fill fails in the first step, or sees no patch."""
    patch_size = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    patch = max(patch_size) if isinstance(patch_size, tuple) else patch_size
    if isinstance(patch, int) and cfg.image_size % patch:
        raise ConfigError(
            f"model.image_size={cfg.image_size}: {cfg.backbone} needs a multiple of its patch "
            f"size {patch}"
        )


def _check_hub(backbone: str, repository: str | None) -> None:
    """Notice in seconds that the hub cannot be reached.

    huggingface_hub tries each of two file names six times with growing pauses: 46 s without a
    network (version 2.4), and a line of warning for every try.

    Raises:
        OSError: nothing is cached and the hub does not answer.
    """
    hub = require("huggingface_hub", f"model.backbone={backbone}")
    is_cached = repository is not None and any(
        isinstance(hub.try_to_load_from_cache(repository, name), str) for name in _WEIGHT_FILES
    )
    if repository is None or is_cached or hub.constants.HF_HUB_OFFLINE:
        return
    endpoint = hub.constants.ENDPOINT
    answers: list[OSError | None] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(endpoint, method="HEAD")
            urllib.request.urlopen(request, timeout=_PROBE_SECONDS).close()
            answers.append(None)
        except urllib.error.HTTPError:
            answers.append(None)
        except OSError as error:
            # certificates are the hub client's affair: it may trust others than urllib does
            is_reachable = "CERTIFICATE" in str(error)
            answers.append(None if is_reachable else error)

    # a thread, because a name server that does not answer is outside urllib's timeout
    asking = threading.Thread(target=ask, name="hub probe", daemon=True)
    asking.start()
    asking.join(_PROBE_SECONDS)
    answer = answers[0] if answers else TimeoutError(f"no answer in {_PROBE_SECONDS:g} s")
    if answer is not None:
        reason = getattr(answer, "reason", answer)
        raise OSError(f"{endpoint} cannot be reached: {reason}")
