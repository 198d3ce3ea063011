#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs a layer with one process a rank under mpirun: [RANKS=4] launch/mpirun.sh CONFIG [ARGUMENTS].
# Uses the installation that launch/demo or launch/test made. All ranks run on this host.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source "$root/launch/environment.sh"

[[ $# -gt 0 ]] || { echo "which CONFIG? usage: [RANKS=4] launch/mpirun.sh CONFIG [ARGUMENTS OF moeos run]" >&2; exit 2; }
[[ -x "$root/.venv/bin/mpirun" && -x "$root/.venv/bin/moeos" ]] || { echo "$root/.venv has no mpirun and moeos: run launch/demo first" >&2; exit 2; }
exec "$root/.venv/bin/mpirun" -n "${RANKS:-4}" "$root/.venv/bin/moeos" run "$@"
