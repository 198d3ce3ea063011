// SPDX-License-Identifier: Apache-2.0
/* Calls that are planned up front: parts are handed out before their inputs are here, and processors
 * wait for these. Does everybody get on, whatever the number of processors?
 *
 * What is modelled, and where it is in the code:
 *
 *   publish        the words of all parts, in the order of    arrivals_subscriber.hpp hand_out_all,
 *                  the ring: first GEMM, second, Combine      returns_subscriber.hpp hand_out_up_front
 *   claim          a ticket, then the wait for its slot       processor.hpp claim
 *   await          the wait for what the part needs           inputs.hpp, processor.hpp await
 *   product0          a part of a tile's first GEMM, counted     processor.hpp complete
 *   product1          a part of its second; the last credits     packet.hpp return_rows
 *                  the owners and sets the counter to 0
 *   combine        a token's results                          warp_processor.hpp
 *   courier        a row to each rank, and its flag           token_dispatch.hpp, packet.hpp
 *   list           the chunks that are to come back, by a     returns_subscriber.hpp await_chunks
 *                  warp that may look late
 *   end            rows returned, token combined, processors  scheduler.hpp finished, interrupt
 *                  back at the ring, chunks listed; then
 *                  credits of what is listed to 0             returns_subscriber.hpp leave
 *
 * Each rank has one token, which has a row on every rank, and one tile. Ranks from BY_ROWS on plan
 * by rows: there a word is published when the part's inputs are here, and nobody waits.
 *
 * What is left out: what exchange.pml has (counts, memory order inside a rank), and failures.
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef PROCESSORS
#define PROCESSORS 1 /* of each rank */
#endif
#ifndef EPOCHS
#define EPOCHS 2
#endif
#ifndef PARTS
#define PARTS 2 /* of each GEMM */
#endif
#ifndef BY_ROWS
#define BY_ROWS RANKS
#endif

#define SLOTS (2 * PARTS + 1)
#define PAIR(here, there) ((here) * RANKS + (there))

/* Which part a ring slot holds. */
#if defined(MUTATION_SECOND_GEMMS_FIRST)
#define IS_PRODUCT1(slot) ((slot) < PARTS)
#define IS_PRODUCT0(slot) ((slot) >= PARTS && (slot) < 2 * PARTS)
#define IS_COMBINE(slot) ((slot) == 2 * PARTS)
#elif defined(MUTATION_COMBINE_FIRST)
#define IS_COMBINE(slot) ((slot) == 0)
#define IS_PRODUCT0(slot) ((slot) > 0 && (slot) <= PARTS)
#define IS_PRODUCT1(slot) ((slot) > PARTS)
#else
#define IS_PRODUCT0(slot) ((slot) < PARTS)
#define IS_PRODUCT1(slot) ((slot) >= PARTS && (slot) < 2 * PARTS)
#define IS_COMBINE(slot) ((slot) == 2 * PARTS)
#endif

/* --- between ranks: [holder][writer] ---------------------------------------------------------- */

byte row[RANKS * RANKS];     /* the call whose row is there */
byte arrived[RANKS * RANKS]; /* its flag */
bool row_needed[RANKS * RANKS];
byte result[RANKS * RANKS * PARTS]; /* [holder][writer][part]: the call whose columns are there */
bool result_needed[RANKS * RANKS * PARTS];
byte returned[RANKS * RANKS]; /* credits */

/* --- a rank's own ------------------------------------------------------------------------------ */

byte started[RANKS]; /* the call that its kernel is at */
byte over[RANKS];    /* the last call that was interrupted */
byte published[RANKS];
byte claimed[RANKS];
byte left[RANKS]; /* processors, couriers and returns subscribers that have ended the call */
bool listed[RANKS];
byte inner[RANKS * PARTS]; /* the call whose part of the first GEMM is there */
byte first_done[RANKS];
byte second_done[RANKS];
bool all_returned[RANKS];
bool combined[RANKS];

#define ROWS_HERE(me, call)                                                                        \
  (arrived[PAIR(me, 0)] == (call) && arrived[PAIR(me, RANKS - 1)] == (call) &&                     \
   arrived[PAIR(me, RANKS / 2)] == (call))
#define RESULTS_HERE(me)                                                                           \
  (returned[PAIR(me, 0)] == 1 && returned[PAIR(me, RANKS - 1)] == 1 &&                             \
   returned[PAIR(me, RANKS / 2)] == 1)

#if defined(MUTATION_ROWS_NOT_AWAITED)
#define AWAIT_ROWS(me, call) skip
#else
#define AWAIT_ROWS(me, call) ROWS_HERE(me, call)
#endif
#if defined(MUTATION_ONE_PART_AWAITED)
#define AWAIT_FIRST(me) first_done[me] >= 1
#else
#define AWAIT_FIRST(me) first_done[me] == PARTS
#endif
#if defined(MUTATION_RESULTS_NOT_AWAITED)
#define AWAIT_RESULTS(me) skip
#else
#define AWAIT_RESULTS(me) RESULTS_HERE(me)
#endif

inline product0(me, call, part, i) {
  AWAIT_ROWS(me, call);
  d_step {
    i = 0;
    do
    :: i < RANKS -> assert(row[PAIR(me, i)] == call); i++
    :: else -> break
    od;
    inner[me * PARTS + part] = call;
    i = 0
  }
  d_step { /* add_release of the counter */
    first_done[me]++;
    do
    :: i < RANKS && first_done[me] == PARTS -> row_needed[PAIR(me, i)] = false; i++
    :: else -> break
    od;
    i = 0
  }
}

inline product1(me, call, part, i) {
  AWAIT_FIRST(me);
  d_step {
    i = 0;
    do
    :: i < PARTS -> assert(inner[me * PARTS + i] == call); i++
    :: else -> break
    od;
    i = 0
  }
  do
  :: i < RANKS ->
     d_step {
       assert(!result_needed[PAIR(i, me) * PARTS + part]);
       result[PAIR(i, me) * PARTS + part] = call;
       result_needed[PAIR(i, me) * PARTS + part] = true;
       i++
     }
  :: else -> break
  od;
  i = 0;
  d_step { /* an atomic: one part is the last */
    second_done[me]++;
    i = (second_done[me] == PARTS -> 0 : RANKS)
  }
  if
  :: i == 0 ->
     d_step {
       all_returned[me] = true;
       second_done[me] = 0;
#if !defined(MUTATION_COUNTER_STAYS)
       first_done[me] = 0;
#endif
       do
       :: i < RANKS -> returned[PAIR(i, me)]++; i++
       :: else -> break
       od
     }
  :: else
  fi;
  i = 0
}

inline combine(me, call, i) {
  AWAIT_RESULTS(me);
  d_step {
    i = 0;
    do
    :: i < RANKS * PARTS ->
       assert(result[me * RANKS * PARTS + i] == call);
       result_needed[me * RANKS * PARTS + i] = false;
       i++
    :: else -> break
    od;
    i = 0
  }
  combined[me] = true
}

proctype processor(byte me) {
  byte call = 0;
  byte ticket = 0;
  byte i = 0;
  do
  :: call == EPOCHS -> break
  :: else ->
     started[me] > call;
     call++;
     do
     :: true ->
        d_step { ticket = claimed[me]; claimed[me]++ }
        if
        :: ticket < published[me] -> skip
        :: over[me] == call -> break
        fi;
        if
        :: IS_PRODUCT0(ticket) -> product0(me, call, ticket % PARTS, i)
        :: IS_PRODUCT1(ticket) -> product1(me, call, ticket % PARTS, i)
        :: IS_COMBINE(ticket) -> combine(me, call, i)
        fi
     od;
     ticket = 0;
     left[me]++
  od
}

proctype courier(byte me) {
  byte call = 0;
  byte to = 0;
  do
  :: call == EPOCHS -> break
  :: else ->
     started[me] > call;
     call++;
     do
     :: to < RANKS ->
        d_step {
          assert(!row_needed[PAIR(to, me)]);
          row[PAIR(to, me)] = call;
          row_needed[PAIR(to, me)] = true
        }
        arrived[PAIR(to, me)] = call;
        to++
     :: else -> break
     od;
     to = 0;
     left[me]++
  od
}

/* A returns subscriber that hands out nothing. It looks when it is given a turn: before the call is
 * over or not. */
proctype returns(byte me) {
  byte call = 0;
  byte i = 0;
  do
  :: call == EPOCHS -> break
  :: started[me] > call && published[me] == SLOTS ->
     d_step { call++; listed[me] = true }
     d_step {
       over[me] == call;
#if !defined(MUTATION_CREDITS_STAY)
       do
       :: i < RANKS -> returned[PAIR(me, i)] = 0; i++
       :: else -> break
       od;
       i = 0;
#endif
       left[me]++
     }
  :: over[me] > call -> d_step { call++; left[me]++ }
  od
}

/* The rest of the OS block. */
proctype os(byte me) {
  byte call = 0;
  byte i = 0;
  do
  :: call == EPOCHS -> break
  :: else ->
     call++;
     started[me] = call;
     do
     :: published[me] == SLOTS -> break
     :: published[me] < SLOTS && me < BY_ROWS -> published[me]++
     :: me >= BY_ROWS && IS_PRODUCT0(published[me]) && ROWS_HERE(me, call) -> published[me]++
     :: me >= BY_ROWS && IS_PRODUCT1(published[me]) && first_done[me] == PARTS -> published[me]++
     :: me >= BY_ROWS && IS_COMBINE(published[me]) && RESULTS_HERE(me) -> published[me]++
     od;
#if defined(MUTATION_CREDITS_CLEARED_WHEN_SEEN)
     RESULTS_HERE(me);
     do
     :: i < RANKS -> returned[PAIR(me, i)] = 0; i++
     :: else -> break
     od;
     i = 0;
#endif
#if !defined(MUTATION_LISTS_NOT_AWAITED)
     listed[me];
#endif
     all_returned[me] && combined[me] && claimed[me] == SLOTS + PROCESSORS;
     over[me] = call;
     left[me] == PROCESSORS + 2; /* the end of the kernel */
     d_step {
       left[me] = 0;
       published[me] = 0;
       claimed[me] = 0;
       all_returned[me] = false;
       combined[me] = false;
       listed[me] = false
     }
  od
}

init {
  byte me = 0;
  byte n = 0;
  atomic {
    do
    :: me < RANKS ->
       run os(me);
       run courier(me);
       run returns(me);
       n = 0;
       do
       :: n < PROCESSORS -> run processor(me); n++
       :: else -> break
       od;
       me++
    :: else -> break
    od
  }
}
