// SPDX-License-Identifier: Apache-2.0
/* Calls whose experts are sliced: ranks with the same tokens add up each other's partial sums.
 *
 * What is modelled, and where it is in the code:
 *
 *   tell             which call this rank makes, and that it   sums_subscriber.hpp tell_all
 *                    has read all sums before
 *   hear             the same of another rank                  sums_subscriber.hpp hear
 *   write_partial    a token's partial sum, into its owner's   packet.hpp outgoing_partial,
 *                    heap                                      kernels' combine
 *   count_partial    the last token of a group raises its      sums.hpp count_partial,
 *                    flag at the owner                         packet.hpp send_partials
 *   take_in          a group whose flags are here, acquired    sums_subscriber.hpp is_ready,
 *                                                              hand_out
 *   add_up           the owner reads all slices' partial sums  kernels' add_slices
 *                    and writes the total to all ranks
 *   announce         the flag of a group's totals              sums.hpp announce_sums,
 *                                                              packet.hpp send_totals
 *   read_total       another rank copies the total             kernels' add_slices
 *   end_call         tokens, sums and what was heard are       slices.hpp combines_of,
 *                    counted; the next epoch                   scheduler.hpp finished
 *
 * With EVERYWHERE each rank gets all totals, and a rank has one row for a partial sum. Else owners
 * alone add up; then a peer may be at its next call meanwhile, and calls of two parities have rows
 * of their own. Flags and words have two parities in both.
 *
 * Memory order. A row is `written`; it becomes `visible` with the release of whoever wrote it or has
 * acquired what others counted, and is `seen` as it was visible at an acquire. Words that publish
 * are visible at once: that they are late is the same as if their writer had been late. Any rank may
 * stand still at any step, so each is late in some state.
 *
 * What is left out: what makes partial sums (exchange.pml has rows of other ranks), slots of the
 * ready ring and who may take them (up_front.pml), failures (abort.pml). A rank's tokens come in any
 * order, each by a processor of its own.
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef EPOCHS
#define EPOCHS 3
#endif
#ifndef OWNERS
#define OWNERS RANKS /* ranks that own tokens: the first ones */
#endif
#ifndef GROUPS
#define GROUPS 1 /* of an owner's tokens */
#endif
#ifndef TOKENS
#define TOKENS 1 /* of a group */
#endif

#define ALL_GROUPS (OWNERS * GROUPS)
#define ALL_TOKENS (ALL_GROUPS * TOKENS) /* at most 4 */
#define OWNER(group) ((group) / GROUPS)
#define GROUP(token) ((token) / TOKENS)

#ifdef EVERYWHERE
#define SUMS ALL_GROUPS /* that a rank writes */
#define ROUNDS 1
#else
#define SUMS (me < OWNERS -> GROUPS : 0)
#define ROUNDS 2
#endif
#ifdef MUTATION_ONE_ROUND_OF_ROWS
#undef ROUNDS
#define ROUNDS 1
#endif

#ifdef MUTATION_FLAGS_IN_ONE_PARITY
#define PARITY(call) 0
#else
#define PARITY(call) ((call) % 2)
#endif
#ifdef MUTATION_WORDS_IN_ONE_PARITY
#define WORD_PARITY(call) 0
#else
#define WORD_PARITY(call) ((call) % 2)
#endif

/* --- the heaps: a partial sum lies at its token's owner ---------------------------------------- */

#define PARTIAL(slice, token, call) ((((call) % ROUNDS) * RANKS + (slice)) * ALL_TOKENS + (token))
byte written[ROUNDS * RANKS * ALL_TOKENS];
byte visible[ROUNDS * RANKS * ALL_TOKENS];
byte seen[ROUNDS * RANKS * ALL_TOKENS];
bool needed[ROUNDS * RANKS * ALL_TOKENS]; /* the owner has not read it; for assertions alone */
#define PARTIAL_FLAG(slice, group, call) ((PARITY(call) * RANKS + (slice)) * ALL_GROUPS + (group))
byte partial_flag[2 * RANKS * ALL_GROUPS];

#define TOTAL(rank, token) ((rank) * ALL_TOKENS + (token))
byte total_written[RANKS * ALL_TOKENS];
byte total_visible[RANKS * ALL_TOKENS];
byte total_seen[RANKS * ALL_TOKENS];
bool total_needed[RANKS * ALL_TOKENS];
#define TOTAL_FLAG(rank, group, call) ((PARITY(call) * RANKS + (rank)) * ALL_GROUPS + (group))
byte total_flag[2 * RANKS * ALL_GROUPS];

#define WORD(to, from, call) ((WORD_PARITY(call) * RANKS + (to)) * RANKS + (from))
byte word[2 * RANKS * RANKS];

/* --- what a rank knows by itself --------------------------------------------------------------- */

byte epoch[RANKS] = 1;
byte told[RANKS]; /* ranks that this one has told of its call */
bool heard[RANKS * RANKS];
byte partial[RANKS * ALL_TOKENS]; /* 0, or: */
#define WRITTEN 1
#define COUNTED 2
byte done[RANKS * ALL_GROUPS]; /* tokens of a group whose partial sums are counted */
byte sum[RANKS * ALL_GROUPS];  /* 0, or: */
#define POSTED 1
#define ADDED 2
#define COMPLETE 3
byte combined[RANKS];

hidden byte i;
hidden byte j;

#define me _pid
#define RUNNING (epoch[me] <= EPOCHS)
#define OF(group) (me * ALL_GROUPS + (group))

#define CAN_TELL (RUNNING && told[me] < RANKS)
inline tell() {
  word[WORD(told[me], me, epoch[me])] = epoch[me];
#ifdef MUTATION_TOLD_BEFORE_THE_CALL
  word[WORD(told[me], me, epoch[me] + 1)] = epoch[me] + 1;
#endif
  told[me]++
}

#define CAN_HEAR(from)                                                                             \
  (RUNNING && !heard[me * RANKS + (from)] && word[WORD(me, from, epoch[me])] == epoch[me])
inline hear(from) {
  heard[me * RANKS + (from)] = true;
  i = 0;
  j = 0;
  do
  :: i < RANKS -> j = j + heard[me * RANKS + i]; i++
  :: else -> break
  od;
  if
#ifndef MUTATION_ENDS_UNHEARD
  :: j == RANKS -> combined[me]++
#endif
  :: else
  fi;
  i = 0;
  j = 0
}

#define CAN_WRITE(token) (RUNNING && partial[me * ALL_TOKENS + (token)] == 0)
inline write_partial(token) {
  /* Not before its owner has read the one before. */
  assert(!needed[PARTIAL(me, token, epoch[me])]);
  written[PARTIAL(me, token, epoch[me])] = epoch[me];
  needed[PARTIAL(me, token, epoch[me])] = true;
  partial[me * ALL_TOKENS + (token)] = WRITTEN
}

#ifdef MUTATION_FIRST_TOKEN_ANNOUNCES
#define IS_LAST(group) (done[OF(group)] == 1)
#else
#define IS_LAST(group) (done[OF(group)] == TOKENS)
#endif
#if defined(MUTATION_PARTIALS_FLAGGED_RELAXED)
#define IS_RELEASED(row, token) false
#elif defined(MUTATION_PARTIALS_COUNTED_RELAXED)
#define IS_RELEASED(row, token) ((row) == (token)) /* what this processor has written itself */
#else
#define IS_RELEASED(row, token) (partial[me * ALL_TOKENS + (row)] == COUNTED)
#endif
#define CAN_COUNT(token) (RUNNING && partial[me * ALL_TOKENS + (token)] == WRITTEN)
inline count_partial(token) {
  partial[me * ALL_TOKENS + (token)] = COUNTED;
  done[OF(GROUP(token))]++;
  combined[me]++;
  i = GROUP(token) * TOKENS;
  do
  :: IS_LAST(GROUP(token)) && i < (GROUP(token) + 1) * TOKENS ->
     if
     :: IS_RELEASED(i, token) ->
        visible[PARTIAL(me, i, epoch[me])] = written[PARTIAL(me, i, epoch[me])]
     :: else
     fi;
     i++
  :: else -> break
  od;
  if
  :: IS_LAST(GROUP(token)) -> partial_flag[PARTIAL_FLAG(me, GROUP(token), epoch[me])] = epoch[me]
  :: else
  fi;
  i = 0
}

#define PARTIAL_IS_HERE(slice, group)                                                              \
  (partial_flag[PARTIAL_FLAG(slice, group, epoch[me])] == epoch[me])
#if defined(MUTATION_ONE_SLICE_AWAITED)
#define PARTIALS_ARE_HERE(group) PARTIAL_IS_HERE(me, group)
#elif defined(MUTATION_ANY_CALLS_FLAG)
#define PARTIALS_ARE_HERE(group)                                                                   \
  (partial_flag[PARTIAL_FLAG(0, group, epoch[me])] > 0 &&                                          \
   partial_flag[PARTIAL_FLAG(RANKS / 2, group, epoch[me])] > 0 &&                                  \
   partial_flag[PARTIAL_FLAG(RANKS - 1, group, epoch[me])] > 0)
#else
#define PARTIALS_ARE_HERE(group)                                                                   \
  (PARTIAL_IS_HERE(0, group) && PARTIAL_IS_HERE(RANKS / 2, group) &&                               \
   PARTIAL_IS_HERE(RANKS - 1, group))
#endif
#ifdef EVERYWHERE
#define TOTAL_IS_HERE(group) (total_flag[TOTAL_FLAG(me, group, epoch[me])] == epoch[me])
#else
#define TOTAL_IS_HERE(group) false
#endif
#define CAN_TAKE_IN(group)                                                                         \
  (RUNNING && sum[OF(group)] == 0 &&                                                               \
   (OWNER(group) == me -> PARTIALS_ARE_HERE(group) : TOTAL_IS_HERE(group)))
inline take_in(group) {
#ifndef MUTATION_FLAGS_NOT_ACQUIRED
  i = (group) * TOKENS;
  do
  :: i < ((group) + 1) * TOKENS ->
     total_seen[TOTAL(me, i)] = total_visible[TOTAL(me, i)];
     j = 0;
     do
     :: j < RANKS && OWNER(group) == me ->
        seen[PARTIAL(j, i, epoch[me])] = visible[PARTIAL(j, i, epoch[me])];
        j++
     :: else -> break
     od;
     i++
  :: else -> break
  od;
  i = 0;
  j = 0;
#endif
  sum[OF(group)] = POSTED
}

#define CAN_ADD_UP(group) (RUNNING && sum[OF(group)] == POSTED)
inline add_up(group) {
  i = (group) * TOKENS;
  do
  :: i < ((group) + 1) * TOKENS && OWNER(group) == me ->
     j = 0;
     do
     :: j < RANKS ->
        assert(seen[PARTIAL(j, i, epoch[me])] == epoch[me]);
        needed[PARTIAL(j, i, epoch[me])] = false;
#ifdef EVERYWHERE
        if
        :: j != me ->
           /* Not before that rank has read the total of the call before. */
           assert(!total_needed[TOTAL(j, i)]);
           total_written[TOTAL(j, i)] = epoch[me];
           total_needed[TOTAL(j, i)] = true
        :: else
        fi;
#endif
        j++
     :: else -> break
     od;
     i++
  :: i < ((group) + 1) * TOKENS && OWNER(group) != me ->
     assert(total_seen[TOTAL(me, i)] == epoch[me]);
     total_needed[TOTAL(me, i)] = false;
     i++
  :: else -> break
  od;
  i = 0;
  j = 0;
  sum[OF(group)] = ADDED
}

#if defined(MUTATION_ENDS_WITHOUT_SUMS)
#define COUNTED_OF(group) 0
#elif defined(MUTATION_ENDS_WITHOUT_TOTALS)
#define COUNTED_OF(group) (OWNER(group) == me)
#else
#define COUNTED_OF(group) 1
#endif
#define CAN_ANNOUNCE(group) (RUNNING && sum[OF(group)] == ADDED)
inline announce(group) {
  i = 0;
  do
  :: i < RANKS && OWNER(group) == me ->
#ifndef MUTATION_TOTALS_FLAGGED_RELAXED
     j = (group) * TOKENS;
     do
     :: j < ((group) + 1) * TOKENS ->
        total_visible[TOTAL(i, j)] = total_written[TOTAL(i, j)];
        j++
     :: else -> break
     od;
     j = 0;
#endif
     total_flag[TOTAL_FLAG(i, group, epoch[me])] = epoch[me];
     i++
  :: else -> break
  od;
  i = 0;
  sum[OF(group)] = COMPLETE;
  combined[me] = combined[me] + COUNTED_OF(group)
}

#if defined(MUTATION_ENDS_WITHOUT_SUMS)
#define CALL_IS_OVER (combined[me] == ALL_TOKENS + 1)
#elif defined(MUTATION_ENDS_WITHOUT_TOTALS)
#define CALL_IS_OVER (combined[me] == ALL_TOKENS + (me < OWNERS -> GROUPS : 0) + 1)
#elif defined(MUTATION_ENDS_UNHEARD)
#define CALL_IS_OVER (combined[me] >= ALL_TOKENS + SUMS)
#else
#define CALL_IS_OVER (combined[me] == ALL_TOKENS + SUMS + 1)
#endif
#define CAN_END (RUNNING && told[me] == RANKS && CALL_IS_OVER)
inline end_call() {
  epoch[me]++;
  told[me] = 0;
  combined[me] = 0;
  i = 0;
  do
  :: i < RANKS -> assert(epoch[me] <= epoch[i] + 1); heard[me * RANKS + i] = false; i++
  :: else -> break
  od;
  i = 0;
  do
  :: i < ALL_TOKENS -> partial[me * ALL_TOKENS + i] = 0; i++
  :: else -> break
  od;
  i = 0;
  do
  :: i < ALL_GROUPS -> done[OF(i)] = 0; sum[OF(i)] = 0; i++
  :: else -> break
  od;
  i = 0
}

active [RANKS] proctype rank() {
  do
  :: d_step { CAN_TELL -> tell() }
  :: d_step { CAN_HEAR(0) -> hear(0) }
  :: d_step { CAN_HEAR(1) -> hear(1) }
#if RANKS > 2
  :: d_step { CAN_HEAR(2) -> hear(2) }
#endif
  :: d_step { CAN_WRITE(0) -> write_partial(0) }
  :: d_step { CAN_COUNT(0) -> count_partial(0) }
  :: d_step { CAN_TAKE_IN(0) -> take_in(0) }
  :: d_step { CAN_ADD_UP(0) -> add_up(0) }
  :: d_step { CAN_ANNOUNCE(0) -> announce(0) }
#if ALL_TOKENS > 1
  :: d_step { CAN_WRITE(1) -> write_partial(1) }
  :: d_step { CAN_COUNT(1) -> count_partial(1) }
#endif
#if ALL_TOKENS > 2
  :: d_step { CAN_WRITE(2) -> write_partial(2) }
  :: d_step { CAN_COUNT(2) -> count_partial(2) }
#endif
#if ALL_TOKENS > 3
  :: d_step { CAN_WRITE(3) -> write_partial(3) }
  :: d_step { CAN_COUNT(3) -> count_partial(3) }
#endif
#if ALL_GROUPS > 1
  :: d_step { CAN_TAKE_IN(1) -> take_in(1) }
  :: d_step { CAN_ADD_UP(1) -> add_up(1) }
  :: d_step { CAN_ANNOUNCE(1) -> announce(1) }
#endif
#if ALL_GROUPS > 2
  :: d_step { CAN_TAKE_IN(2) -> take_in(2) }
  :: d_step { CAN_ADD_UP(2) -> add_up(2) }
  :: d_step { CAN_ANNOUNCE(2) -> announce(2) }
#endif
#if ALL_GROUPS > 3
  :: d_step { CAN_TAKE_IN(3) -> take_in(3) }
  :: d_step { CAN_ADD_UP(3) -> add_up(3) }
  :: d_step { CAN_ANNOUNCE(3) -> announce(3) }
#endif
  :: d_step { CAN_END -> end_call() }
  :: epoch[me] > EPOCHS -> break
  od
}
