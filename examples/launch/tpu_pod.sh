#!/bin/bash
# Trains on all hosts of a Cloud TPU slice. Edit what stands above the line; run it anywhere that has gcloud.
#
# JAX asks the metadata server which host is which, so the same command starts one process on each. The code has to
# be on the hosts, with `pip install . "jax[tpu]" orbax-checkpoint ...` (setup.py, [examples]) done there.
#
# A slice is whole or it does not run: where a host is lost each start fails until Google Cloud has repaired it.
set -u

NAME=my-slice
ZONE=us-central2-b
FOLDER=scalax                 # where the code is, on each host
SAVED=gs://my-bucket/llama    # where all hosts can write (pip install gcsfs)
STARTS=10
# ---------------------------------------------------------------------------------------------------------

# All hosts sign what they tell each other with one secret. It goes there as a file: a command can be read by others.
token=$(mktemp)               # which is readable for this user alone, as are the copies
trap 'rm -f "$token"' EXIT
od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$token"
gcloud compute tpus tpu-vm scp "$token" "$NAME:.scalax_run_token" --zone="$ZONE" --worker=all || exit 1

lost_at=                      # the training says how long it took from here to its first step
for ((start = 1; start <= STARTS; start++)); do
  train="export SCALAX_RUN_TOKEN=\$(cat .scalax_run_token) && cd $FOLDER && LOST_AT=$lost_at python -m examples.llama.train --strategy=fsdp --checkpoints=$SAVED"
  # Returns when all hosts have ended. Where one is lost, the others end by themselves within 20 seconds.
  gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all --command="$train --output=runs/llama"
  code=$?
  case $code in
    0 | 2) exit $code ;;                                     # done; wrong flags
    75) echo 'The slice is being taken away; the run is saved.' >&2; exit $code ;;
  esac
  lost_at=$(date +%s)
  echo "start $start of $STARTS ended with exit code $code" >&2
done
exit "$code"
