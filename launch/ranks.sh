# SPDX-License-Identifier: Apache-2.0
# Sourced by launch/straggler, launch/evaluate and launch/train: one process a rank on this host.
#   [RANKS=4] [LAUNCHER=mpirun|torchrun]
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"
source "$root/launch/environment.sh"

# run_on_ranks MODULE [ARGUMENTS]: installs moeos at need, with what GPUs need where there are some
# and with the extra that $also names, and becomes the launcher, which runs the module on every rank.
run_on_ranks() {
  local launcher="${LAUNCHER:-mpirun}" ranks="${RANKS:-4}"
  local start extras=()
  [[ -e /proc/driver/nvidia/version ]] && extras+=(cuda)
  case "$launcher" in
    mpirun)
      extras+=(mpi)
      start=("$venv/bin/mpirun" -n "$ranks" "$venv/bin/python")
      ;;
    torchrun) start=("$venv/bin/torchrun" --standalone --nproc-per-node "$ranks") ;;
    *) fail "LAUNCHER is '$launcher'; allowed: mpirun, torchrun" ;;
  esac
  [[ -n "${also:-}" ]] && extras+=("$also")
  install_moeos "$(IFS=,; echo "${extras[*]:-run}")"
  cd "$root"
  exec "${start[@]}" -m "$@"
}
