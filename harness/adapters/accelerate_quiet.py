"""While a resumed script goes through what it has done, nothing that it saves, logs or prints goes
out. Runs in the worker."""

from __future__ import annotations

import builtins
import io
import logging
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from harness.adapters.script_variables import is_script

# (module, object within it or "", function): what writes, where the script has imported it
WRITERS = (
    ("torch", "", "save"),
    ("safetensors.torch", "", "save_file"),
    ("safetensors.torch", "", "save_model"),
    ("transformers.modeling_utils", "PreTrainedModel", "save_pretrained"),
    ("transformers.modeling_utils", "PreTrainedModel", "push_to_hub"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", "save_pretrained"),
    ("diffusers.models.modeling_utils", "ModelMixin", "save_pretrained"),
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "save_pretrained"),
    ("peft.peft_model", "PeftModel", "save_pretrained"),
    ("huggingface_hub.hf_api", "HfApi", "upload_folder"),
    ("huggingface_hub.hf_api", "HfApi", "upload_file"),
    ("huggingface_hub", "", "upload_folder"),
    ("wandb", "", "log"),
    ("shutil", "", "rmtree"),
)
# what registered objects (averages of weights, counters) do once for each step
ADVANCES = ("step", "update", "update_parameters")


class Silence(io.TextIOBase):
    """Takes all and keeps nothing."""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


class Quiet:
    """Between `begin` and `end`. Exceptions are still seen."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def begin(self, accelerators: list[Any], registered: list[Any]) -> None:
        for module, inner, name in WRITERS:
            home = sys.modules.get(module)
            owner = getattr(home, inner, None) if inner else home
            if owner is not None and hasattr(owner, name):
                self._set(owner, name, _nothing)
        for thing in registered:
            for name in ADVANCES:
                if callable(getattr(thing, name, None)):
                    self._set(thing, name, _nothing)
        for accelerator in accelerators:
            self._set(accelerator, "trackers", [])
        self._set(sys, "stdout", Silence())
        self._set(builtins, "open", _opener(open))
        for name in ("open", "write_text", "write_bytes"):
            self._set(pathlib.Path, name, _elsewhere(getattr(pathlib.Path, name), name != "open"))
        before = logging.root.manager.disable
        logging.disable(logging.ERROR)
        self._undo.append(lambda: logging.disable(before))

    def _set(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner)
        if name in own:
            before = own[name]
            self._undo.append(lambda: setattr(owner, name, before))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def end(self) -> None:
        while self._undo:
            self._undo.pop()()


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _by_script() -> bool:
    frame = sys._getframe(2)
    return is_script(frame.f_code.co_filename, frame.f_globals)


def _writes(mode: str) -> bool:
    return any(sign in mode for sign in "wax+")


def _opener(real: Any) -> Any:
    """What the script writes with `open` goes nowhere; libraries' files do not change."""

    def quiet_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if _writes(mode) and _by_script():
            file, mode = os.devnull, mode.replace("x", "w")
        return real(file, mode, *args, **kwargs)

    return quiet_open


def _elsewhere(real: Any, always: bool) -> Any:
    """As `_opener`, of a method of Path. `always`: it writes whatever its arguments are."""

    def quiet_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode = "w" if always else str(args[0] if args else kwargs.get("mode", "r"))
        if _writes(mode) and _by_script():
            self = pathlib.Path(os.devnull)
            args = (mode.replace("x", "w"), *args[1:]) if args and not always else args
        return real(self, *args, **kwargs)

    return quiet_method
