#!/usr/bin/env bash
# Take the screenshots of TensorBoard for notebooks/README.md from a finished run:
#
#   python -m vit_finetune fit --config configs/quickstart.yaml
#   .github/screenshots.sh runs
#
# Needs this project's environment and Chromium, without a display (Debian and Ubuntu: apt-get install chromium).
set -euo pipefail
runs=${1:?Usage: .github/screenshots.sh RUNS}
assets=$(dirname "$0")/assets
port=${PORT:-6106}

tensorboard --logdir "$runs" --port "$port" --samples_per_plugin images=100 &
trap 'kill %1' EXIT
until curl --silent --fail "http://localhost:$port/data/runs" | grep --quiet version_; do sleep 1; done

# SCALARS and not TIME SERIES, whose curves Chromium leaves out of an image taken without a display.
curves='loss_step%7C%5Eval%2F(acc%7Closs)%24%7Cgrad_norm%7Clr%7Cper_second%7Cfp16%7Cmemory'
for tab in scalars images hparams; do
  # The virtual clock runs on only while nothing loads, so a slow machine gets the same image.
  chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars --window-size=1500,1000 \
    --user-data-dir="$(mktemp --directory)" --virtual-time-budget=30000 \
    --screenshot="$assets/tensorboard-$tab.png" \
    "http://localhost:$port/#$tab&_smoothingWeight=0&tagFilter=$([ $tab = scalars ] && echo "$curves")"
done
