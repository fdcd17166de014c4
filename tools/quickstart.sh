#!/usr/bin/env bash
# Trains a small GPT, kills it with SIGKILL while a checkpoint is being uploaded, resumes it, and shows that the losses are
# those of an uninterrupted run, to the last bit. Starts and stops an S3 server of its own; needs no account.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/env.sh
export PATH="$PWD/.venv/bin:$PATH"
work="$(mktemp -d)"
trainer="" server=""
finish() {
    for pid in $trainer $server; do kill "$pid" 2>/dev/null || true; done
    for pid in $server; do while kill -0 "$pid" 2>/dev/null; do sleep 0.1; done; done
    rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM
title() { printf '\n\033[1m== %s\033[0m\n' "$*"; }
demo() { python tools/train_demo.py run --url "s3://quickstart/$1" --losses "$work/$1.jsonl"; }

title "starting a local S3 server (objckpt local --detach)"
objckpt local --detach --bucket quickstart --dir "$work/s3" >"$work/env"
cat "$work/env"
. "$work/env"
server="$OBJCKPT_LOCAL_PID"

title "reference: a run that nobody disturbs"
demo reference

title "second run: killed with SIGKILL while an upload is in flight"
mkfifo "$work/events"
python tools/train_demo.py run --url s3://quickstart/killed --losses "$work/killed.jsonl" >"$work/events" &
trainer=$!
killed=""
while IFS= read -r line; do
    echo "$line"
    case "$line" in
    "step "[3-9]*"upload in flight") # the third checkpoint or a later one
        kill -KILL "$trainer"
        killed=yes
        break
        ;;
    esac
done <"$work/events"
wait "$trainer" 2>/dev/null || true
trainer=""
[ -n "$killed" ] || { echo "quickstart: no upload was caught in flight" >&2; exit 1; }
echo "-- killed; the uploader is a process of its own and finishes what was staged"

title "the same command again: it resumes from the newest committed checkpoint"
demo killed | tee "$work/resumed"
grep -q '^resumed from step' "$work/resumed" || { echo "quickstart: the second run did not resume" >&2; exit 1; }

title "do both runs have the same losses?"
python tools/train_demo.py compare "$work/reference.jsonl" "$work/killed.jsonl"

title "objckpt ls s3://quickstart/killed"
objckpt ls s3://quickstart/killed

title "objckpt verify s3://quickstart/killed"
objckpt verify s3://quickstart/killed

title "done; the server is stopped and its data removed. To go on with one that stays:"
echo '. .venv/bin/activate; eval "$(objckpt local --detach)"; objckpt ls s3://checkpoints/run42'
