#!/bin/sh
# Train water, check it, explore and label by GFN1-xTB, train on, check: sh examples/water_explore/run.sh
# A second call goes on where the first one was stopped.
set -e
cd "$(dirname "$0")/../water_xtb"
test -e model.ckpt.pt || dp --pt train input.json
cd ../water_explore
dp --pt check ../water_xtb/model.ckpt.pt --train-data ../water_xtb/input.json || echo "the check fails: go on with dp explore"
dp explore explore.json
