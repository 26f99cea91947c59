#!/bin/sh
# What a script without any library of ours can know and tell.
set -eu
echo "batch $ROBUST_TRAIN_BATCH_SIZE on $ROBUST_TRAIN_DEVICE, attempt $ROBUST_TRAIN_ATTEMPT"
echo "sees <$CUDA_VISIBLE_DEVICES> checkpoint <$ROBUST_TRAIN_CHECKPOINT> in $ROBUST_TRAIN_RUN_DIR"
echo 'this is no JSON' >> "$ROBUST_TRAIN_EVENTS"
echo '{"event": "checkpoint", "path": "~nobody/\u0000"}' >> "$ROBUST_TRAIN_EVENTS"
echo "{\"event\": \"deep\", \"v\": $(printf '[%.0s' $(seq 600))$(printf ']%.0s' $(seq 600))}" >> "$ROBUST_TRAIN_EVENTS"
echo '{"event": "job_ended", "status": "completed"}' >> "$ROBUST_TRAIN_EVENTS"
echo '{"event": "started", "step": 2}' >> "$ROBUST_TRAIN_EVENTS"
echo '{"event": "progress", "step": 5, "loss": 0.25, "attempt": 99}' >> "$ROBUST_TRAIN_EVENTS"
echo '{"event": "mine", "note": "kept"}' >> "$ROBUST_TRAIN_EVENTS"
printf '{"event": "result", "value": {"objective": 0.75}}' >> "$ROBUST_TRAIN_EVENTS"
