# SPDX-License-Identifier: Apache-2.0
# Sourced by launch/demo and launch/test: makes .venv and installs moeos into it.
#
# The install is editable: .venv lies inside the working tree and serves only it, so an edit of a
# Python file is in force at once, also for tools that are started by hand. C++ is compiled without
# build isolation in build/, so a change recompiles only what it touches and asks no registry.

readonly root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly venv="$root/.venv"

fail() {
  printf 'moeos: %s\n' "$*" >&2
  exit 1
}

# What an installation depends on: the contents of all that is built, and the interpreter.
fingerprint() {
  (
    cd "$root"
    "$venv/bin/python" --version
    find pyproject.toml CMakeLists.txt runtime kernels host -type f \
      -not -path '*/__pycache__/*' -not -path '*/.*_cache/*' -not -name '*.so' -print0 |
      LC_ALL=C sort -z | xargs -0 sha256sum
  ) | sha256sum | cut -d' ' -f1
}

# The packages named by [build-system] in pyproject.toml, one a line.
build_requirements() {
  "$venv/bin/python" - "$root/pyproject.toml" <<'PYTHON'
import sys

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

with open(sys.argv[1], "rb") as file:
    print("\n".join(tomllib.load(file)["build-system"]["requires"]))
PYTHON
}

make_venv() {
  if [[ -x "$venv/bin/python" ]] && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    return
  fi
  command -v python3 >/dev/null || fail "python3 is missing; moeos needs Python 3.10 or newer"
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$(python3 --version) is too old; moeos needs Python 3.10 or newer"
  printf 'moeos: creating %s\n' "$venv"
  python3 -m venv --clear "$venv" ||
    fail "python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"
}

check_compiler() {
  command -v "${CXX:-c++}" >/dev/null ||
    fail "there is no C++ compiler; on Debian and Ubuntu: apt-get install g++"
  "$venv/bin/python" -c '
import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_paths()["include"], "Python.h").exists())' ||
    fail "Python.h is missing; on Debian and Ubuntu: apt-get install python3-dev"
}

# install_moeos EXTRA: installs moeos with EXTRA ("run": none, "mpi": mpirun, "plots": matplotlib,
# "cuda": what GPUs need, also as "cuda,mpi,plots", "test": what the tests need), unless this very
# state of the tree is installed already.
install_moeos() {
  local extra="$1" stamp state packages
  local pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet --quiet install)
  make_venv
  stamp="$venv/moeos-$extra.stamp"
  state="$(fingerprint)"
  if [[ -f "$stamp" && "$(<"$stamp")" == "$state" ]]; then
    return
  fi
  check_compiler

  if [[ ! -e /proc/driver/nvidia/version ]] &&
    ! "$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then
    # Without a GPU: the release that is tested, as a CPU build where pip is set up to find one.
    printf 'moeos: installing PyTorch into %s, which takes minutes\n' "$venv"
    "${pip[@]}" torch==2.13.0
  fi
  printf 'moeos: compiling the twin and installing moeos into %s\n' "$venv"
  mapfile -t packages < <(build_requirements)
  "${pip[@]}" "${packages[@]}"
  case "$extra" in
    run) "${pip[@]}" --no-build-isolation --editable "$root" ;;
    mpi | cuda | plots | cuda,mpi | mpi,plots | cuda,plots | cuda,mpi,plots | test)
      "${pip[@]}" --no-build-isolation --editable "$root[$extra]"
      ;;
    *) fail "install_moeos: '$extra' is unknown; allowed: run, test, or some of cuda,mpi,plots" ;;
  esac
  printf '%s\n' "$state" >"$venv/moeos-run.stamp"
  printf '%s\n' "$state" >"$stamp"
}
