#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a layer with one process a rank under torchrun: [RANKS=4] launch/torchrun.sh CONFIG [ARGUMENTS].
# Uses the installation that launch/demo or launch/test made. No MPI takes part: the ranks meet in the
# key-value store of torchrun.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/launch/environment.sh"

[[ $# -gt 0 ]] || { echo "which CONFIG? usage: [RANKS=4] launch/torchrun.sh CONFIG [ARGUMENTS OF moeos run]" >&2; exit 2; }
[[ -x "$root/.venv/bin/torchrun" && -x "$root/.venv/bin/moeos" ]] || { echo "$root/.venv has no torchrun and moeos: run launch/demo first" >&2; exit 2; }
exec "$root/.venv/bin/torchrun" --standalone --nproc-per-node "${RANKS:-4}" \
  --no-python "$root/.venv/bin/moeos" run "$@"
