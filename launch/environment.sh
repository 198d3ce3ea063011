# SPDX-License-Identifier: Apache-2.0
# Sourced by every launcher: the environment in which ranks of one host start under Open MPI 5.
# Each value gives way to one that the caller has set.

# mpirun refuses root unless told twice; nobody else needs this.
if [[ "$(id -u)" == 0 ]]; then
  export OMPI_ALLOW_RUN_AS_ROOT="${OMPI_ALLOW_RUN_AS_ROOT:-1}"
  export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-1}"
fi

# More ranks than cores are welcome, and no rank is tied to a core: the twin's waits back off.
export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}"
export PRTE_MCA_hwloc_default_binding_policy="${PRTE_MCA_hwloc_default_binding_policy:-none}"

# MPI carries a few hundred bytes when a layer is made, and no tokens. TCP over loopback is enough for
# that: it needs no other network interface, leaves nothing in /dev/shm, and starts a second sooner
# than a search for faster transports.
export OMPI_MCA_pml="${OMPI_MCA_pml:-ob1}"
export OMPI_MCA_btl="${OMPI_MCA_btl:-self,tcp}"
export OMPI_MCA_btl_tcp_if_include="${OMPI_MCA_btl_tcp_if_include:-127.0.0.0/8}"

# Ranks share the host's cores: no thread pool for each.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
