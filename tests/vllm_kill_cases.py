"""What test_vllm.py runs: kill_cases.py for trainings that generate with vLLM, and points within them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import kill_cases
import torch.optim
from kill_cases import AFTER, BEFORE, POINTS

from dapo.config import VllmConfig
from dapo.lora import Adapters
from dapo.rollout.vllm import VLLMEngine, import_vllm

if __name__ == "__main__":
    import_vllm(VllmConfig(cpu_kv_cache_gb=1))
    from vllm.v1.engine.llm_engine import LLMEngine

    POINTS.clear()
    POINTS |= {
        "generation": (LLMEngine, "step", 4, BEFORE),
        "update": (torch.optim.AdamW, "step", 1, AFTER),
        "sync": (Adapters, "merged", 8, BEFORE),  # some of the weights are in the engine
        "proof": (VLLMEngine, "score", 1, BEFORE),
    }
    kill_cases.run_cases(json.loads(Path(sys.argv[1]).read_text()), at_a_time=2)
