// SPDX-License-Identifier: Apache-2.0
// Couriers alone, under a schedule: a whole world seldom shows that one of them takes a chunk
// behind another, to whom it was listed later. Must not depend on: who watches.
#pragma once

#include "kernels/twin/explore/schedule.hpp"
#include "runtime/words/base.hpp"

/// Lists some chunks for several couriers; whether they take each of them.
bool couriers_take_every_chunk(moeos::u64 seed, moeos::twin::Strategy strategy);
