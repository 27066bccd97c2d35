#!/bin/sh
# Train water, check it, explore and label by GFN1-xTB, train on, check: sh examples/water_explore/run.sh
# A second call goes on where the first one was stopped.
set -e
cd "$(dirname "$0")"
test -e rounds || dp --pt train train.json --restart auto
dp --pt check model.ckpt.pt --train-data train.json || echo "the check fails: go on with dp explore"
dp explore explore.json
