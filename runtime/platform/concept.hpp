// SPDX-License-Identifier: Apache-2.0
// The only seam between the device OS and a machine: what `platform/twin` and `platform/cuda` must
// provide.
//
// A platform has static members for warps, atomics and time, and one object per rank for the way to
// its peers. Every atomic access of the runtime goes through these names, so a platform can order,
// delay, count or replay them; nothing else in the runtime accesses shared memory with ordinary
// loads and stores unless an acquire that a comment names has ordered it.
//
// Two pairs of accesses publish data:
//   store_release / add_release  -> load_acquire           one word at a time;
//   publish_fence, then publish  -> poll, then acquire_fence   many words in one sweep: on the GPU
//                                   the words are relaxed and one fence a sweep orders them all
//                                   (1.35 us against 2.35 us with an acquire per word).
// Each fence orders one way. An actor that passes on what it has acquired needs both, relay_fence.
// All lanes execute acquire_fence and relay_fence, after which each has what any of them has
// acquired.
#pragma once

#include "runtime/words/base.hpp"

namespace moeos {

/// What a put does to the signal after its bytes: an arrival flag is set, a credit is added to.
enum class SignalOp : u8 { set, add };

// NVRTC has no <concepts>.
template <class A, class B>
inline constexpr bool kSame = false;
template <class A>
inline constexpr bool kSame<A, A> = true;
template <class A, class B>
concept SameAs = kSame<A, B>;

template <class P>
concept Platform = requires(const P& platform, u32* word, const u32* read_only, u64* wide,
                            u32 value, u32& idle, const void* source) {
  // A warp: kLanes threads in step. The twin's warp has one lane.
  { P::kLanes } -> SameAs<const u32&>;
  { P::lane() } -> SameAs<u32>;
  { P::ballot(true) } -> SameAs<u32>;             // bit i: lane i's predicate
  { P::lanes_before(value) } -> SameAs<u32>;      // of a ballot: lanes before this one
  { P::count(value) } -> SameAs<u32>;             // of a ballot: lanes
  { P::first_lane(value) } -> SameAs<u32>;        // of a ballot; 0 of none
  { P::broadcast(value, value) } -> SameAs<u32>;  // (value, source lane)
  { P::inclusive_scan(value) } -> SameAs<u32>;
  { P::exclusive_or(value) } -> SameAs<u32>;  // of all lanes' values
  { P::alike(value) } -> SameAs<u32>;         // as a ballot: lanes that have this lane's value
  P::sync_lanes();
  // The same value, opaque to the compiler: what follows from it is computed where it is needed,
  // and takes no register before.
  { P::opaque(value) } -> SameAs<u32>;

  // Atomics, each with the scope of the actors that must agree.
  { P::template load_relaxed<Scope::device>(read_only) } -> SameAs<u32>;
  { P::template load_acquire<Scope::system>(read_only) } -> SameAs<u32>;
  P::template store_relaxed<Scope::device>(word, value);
  P::template store_release<Scope::system>(wide, u64{0});
  { P::template add_relaxed<Scope::device>(word, value) } -> SameAs<u32>;  // the value before
  P::template count_relaxed<Scope::device>(word, value);  // adds; the value before is not returned
  P::template count_relaxed<Scope::device>(wide, u64{0});
  P::template add_release<Scope::system>(word, value);  // likewise
  {
    P::template add_acquire_release<Scope::device>(word, value)
  } -> SameAs<u32>;  // the value before
  {
    P::template compare_exchange_release<Scope::system>(word, value, value)
  } -> SameAs<bool>;  // success
  {
    P::template compare_exchange_relaxed<Scope::device>(word, value, value)
  } -> SameAs<u32>;  // the value before

  // Sweeps over many words. The caller must use the value that was read: machine code drops other
  // loads, and what they acquire.
  { P::template poll<Scope::system>(read_only) } -> SameAs<u32>;
  // A poll that adds: passes on what the fence before it has published and what it has polled.
  { P::template poll_add<Scope::device>(word, value) } -> SameAs<u32>;
  P::template acquire_fence<Scope::system>();
  P::template publish_fence<Scope::device>();
  P::template relay_fence<Scope::device>();  // both: what was polled, for what is published
  P::template publish<Scope::device>(word, value);
  P::template publish_add<Scope::system>(word, value);

  // Time: a clock for deadlines, and what a waiting loop does between two looks.
  { P::now_ns() } -> SameAs<u64>;
  P::pause(idle);
  P::rest(idle);  // the loop found work: reset its idle time

  // Whether actors do what a rank's fault plan says (faults.hpp).
  { P::has_faults() } -> SameAs<bool>;

  // Peers: the address of rank p's heap here, or null when p can only be reached by puts into its
  // heap (rank, byte offset). Without kRemotePeers it is never null, and no put is compiled.
  { P::kRemotePeers } -> SameAs<const bool&>;
  { P::kSenders } -> SameAs<const u32&>;  // warps of the OS block that put (sender.hpp)
  // Warps of the OS block that count returned rows: at least one (returns_subscriber.hpp).
  { P::kReturnsSubscribers } -> SameAs<const u32&>;
  { platform.peer(value) } -> SameAs<u8*>;
  // By all lanes of a warp: bytes of this rank's own heap. Puts may overtake each other. A put's
  // signal, a word of Geometry::signal_bytes(), changes after its bytes have arrived.
  platform.put(value, u64{0}, source, u64{0});
  platform.put_signal(value, u64{0}, source, u64{0}, u64{0}, SignalOp::set, value);
  // By one lane: a word, set or added to; publishes nothing but itself ...
  platform.put_word(value, u64{0}, u64{0});
  platform.add_word(value, u64{0}, value);
  // ... unless it is put after order_puts: what the caller puts to a rank from then on arrives
  // there after all that it has put there before.
  platform.order_puts();
};

}  // namespace moeos
