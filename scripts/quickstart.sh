#!/usr/bin/env bash
# Sets everything up and trains a small pretrained model by DAPO: no GPU, no account, no hub.
#   bash scripts/quickstart.sh [section.key=value ...]     such as seed=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/install.sh

install_environment train
install_model

run=runs/quickstart
for ((n = 2; ; n++)); do
    [ -e "$run" ] || break
    run=runs/quickstart-$n
done
echo "training in $run; Ctrl-C stops it and leaves its files whole"
"$VENV/bin/dapo" train configs/quickstart.yaml run_dir="$run" "$@"
