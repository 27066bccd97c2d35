#!/bin/sh
# Train water, check it, explore and label by GFN1-xTB, train on, check: sh examples/water_explore/run.sh
# A second call goes on where the first one was stopped.
set -e
cd "$(dirname "$0")"
test -e model.ckpt.pt || dp --pt train input.json
dp --pt check model.ckpt.pt --train-data input.json || echo "the check fails: go on with dp explore"
dp explore explore.json
