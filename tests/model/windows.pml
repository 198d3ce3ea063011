// SPDX-License-Identifier: Apache-2.0
/* Two ranks that reach each other by puts alone: requests, windows, and what has landed.
 *
 * What is modelled, and where it is in the code:
 *
 *   route          counts, put as words                       packet.hpp send_count
 *   stage          a row, or a result, into this rank's heap, packet.hpp post_request
 *                  and a request into the peer's outbox
 *   put            the next request, if the window has room   sender.hpp send, reserve
 *   arrive         a put's bytes, then its signal             packet.hpp put_chunk, put_results
 *   land           rows added to landed, behind the bytes     sender.hpp send: order_puts, add_word
 *   echo           what is new of that is told to the peer    sender.hpp echo
 *   hear           ... and arrives there                      sender.hpp echoed
 *   compute        a row that is here, to a staged result     warp_processor.hpp, arrivals_subscriber.hpp
 *   combine        a result that is back; its credit to 0     returns_subscriber.hpp
 *   end            counts known, all rows put back, all own   scheduler.hpp finished
 *                  rows combined: the next call
 *
 * Between two ranks everything may overtake everything, except what order_puts and a put's own
 * signal forbid. A put reads the staged row when it arrives, so a row that is staged too early
 * would be seen. Chunks are of one row; both rounds share the window.
 *
 * What is left out: what exchange.pml has (memory order inside a rank, late processors, parts), and
 * failures. Several senders are one, that takes requests in order. With ONE_WAY rank 0
 * sends ROWS rows and rank 1 none.
 */

#ifndef EPOCHS
#define EPOCHS 2
#endif
#ifndef ROWS
#define ROWS 2 /* that a rank sends to the other in a call, at most */
#endif
#ifndef WINDOW
#define WINDOW 1 /* rows that may be under way to a peer */
#endif

#define DISPATCH 0
#define COMBINE 1
#define SLOTS (2 * ROWS)
#define AT(rank, round, row) (((rank) * 2 + (round)) * ROWS + (row))
#define COUNT(source, call) ((source) * 2 + (call) % 2)
#define OTHER(me) (1 - (me))

/* epoch | kind | task in the code */
#define REQUEST(call, round, row) ((call) * 8 + (round) * 4 + (row))
#define EPOCH_OF(word) ((word) / 8)
#define ROUND_OF(word) ((word) / 4 % 2)
#define ROW_OF(word) ((word) % 4)
#define COUNT_WORD(call, rows) ((call) * 8 + (rows))

/* --- the heaps: what a rank has put to the other lies there, and is indexed by the writer ---- */

byte count_put[4];
byte count_here[4];
byte row_here[2 * 2 * ROWS]; /* [writer][round][row]: the call whose values are there */
byte arrived[2 * ROWS];      /* [writer][row]: epoch */
byte returned[2 * ROWS];     /* [writer][row]: rows */
byte landed[2];              /* [writer] */
byte echoed[2];              /* [rank]: rows of its own that it has been told of */

/* --- on the way ------------------------------------------------------------------------------- */

byte bytes_under_way[2 * 2 * ROWS]; /* the call of the put, or 0 */
byte signal_under_way[2 * 2 * ROWS];
bool landed_under_way[2 * 2 * ROWS];
byte echo_under_way[2];      /* [who told]: rows */
short sums_under_way[2];     /* of a mutation, [who told]: bit n: the sum n */

/* --- what a rank knows by itself -------------------------------------------------------------- */

byte epoch[2] = 1;
bool routed[2];
byte rows_sent[2];
byte staged[2 * 2 * ROWS]; /* the call whose values are there */
bool row_staged[2 * ROWS]; /* in this call */
byte outbox[2 * SLOTS];
byte tickets[2];
byte next_request[2];
byte rows_put[2];
byte rows_told[2];
bool computed[2 * ROWS]; /* [owner][row] */
byte rows_returned[2];
byte combined[2];
bool is_combined[2 * ROWS];

hidden byte i;

#define RUNNING(me) (epoch[me] <= EPOCHS)
#define COUNT_IS_KNOWN(me) (count_here[COUNT(OTHER(me), epoch[me])] / 8 == epoch[me])
#define ROWS_RECEIVED(me) (count_here[COUNT(OTHER(me), epoch[me])] % 8)

/* --- steps ------------------------------------------------------------------------------------ */

inline route(me) {
  if
#ifdef ONE_WAY
  :: me == 0 -> rows_sent[me] = ROWS
  :: me == 1 -> rows_sent[me] = 0
#else
  :: rows_sent[me] = 0
  :: rows_sent[me] = 1
  :: ROWS > 1 -> rows_sent[me] = 2
#endif
  fi;
  count_put[COUNT(me, epoch[me])] = COUNT_WORD(epoch[me], rows_sent[me]);
  routed[me] = true
}

inline stage(me, round, row) {
  assert(bytes_under_way[AT(me, round, row)] == 0); /* no put still reads the row before it */
  staged[AT(me, round, row)] = epoch[me];
  assert(tickets[me] < SLOTS);
  outbox[(me) * SLOTS + tickets[me]] = REQUEST(epoch[me], round, row);
  tickets[me]++;
#ifdef MUTATION_ENDS_BEFORE_PUT
  rows_returned[me] = rows_returned[me] + (round)
#endif
}

#define NEXT_WORD(me) (outbox[(me) * SLOTS + next_request[me]])
#define HAS_REQUEST(me) \
  (RUNNING(me) && next_request[me] < SLOTS && EPOCH_OF(NEXT_WORD(me)) == epoch[me])
#ifdef MUTATION_WINDOW_UNCHECKED
#define HAS_ROOM(me) true
#else
#define HAS_ROOM(me) (rows_put[me] - echoed[me] + 1 <= WINDOW)
#endif
#define UNDER_WAY_NOW(at) (bytes_under_way[at] != 0 -> 1 : 0)
inline put(me) {
  i = AT(me, ROUND_OF(NEXT_WORD(me)), ROW_OF(NEXT_WORD(me)));
  rows_put[me]++;
  bytes_under_way[i] = epoch[me];
  signal_under_way[i] = epoch[me];
  landed_under_way[i] = true;
#ifndef MUTATION_ENDS_BEFORE_PUT
  rows_returned[me] = rows_returned[me] + ROUND_OF(NEXT_WORD(me));
#endif
  next_request[me]++;
  i = 0;
#if ROWS == 2
  assert(UNDER_WAY_NOW(AT(me, 0, 0)) + UNDER_WAY_NOW(AT(me, 0, 1)) + UNDER_WAY_NOW(AT(me, 1, 0)) +
             UNDER_WAY_NOW(AT(me, 1, 1)) <=
         WINDOW)
#endif
}

inline give_signal(me, round, row) {
  if
  :: round == DISPATCH -> arrived[(me) * ROWS + row] = signal_under_way[AT(me, round, row)]
  :: else -> returned[(me) * ROWS + row] = returned[(me) * ROWS + row] + 1
  fi;
  signal_under_way[AT(me, round, row)] = 0
}
inline arrive(me, round, row) {
  row_here[AT(me, round, row)] = staged[AT(me, round, row)];
  bytes_under_way[AT(me, round, row)] = 0;
#ifndef MUTATION_SIGNAL_OVERTAKES
  give_signal(me, round, row)
#endif
}

#ifdef MUTATION_PUTS_UNORDERED
#define CAN_LAND(me, round, row) (landed_under_way[AT(me, round, row)])
#else
#define CAN_LAND(me, round, row) \
  (landed_under_way[AT(me, round, row)] && bytes_under_way[AT(me, round, row)] == 0)
#endif
inline land(me, round, row) {
  landed_under_way[AT(me, round, row)] = false;
  landed[me]++
}

#ifdef MUTATION_ECHO_WAITS_FOR_ROOM
#define IS_BUSY(me) (HAS_REQUEST(me))
#else
#define IS_BUSY(me) false
#endif
#define CAN_ECHO(me) (RUNNING(me) && landed[OTHER(me)] != rows_told[me] && !IS_BUSY(me))
inline echo(me) {
#ifdef MUTATION_ECHO_IS_A_SUM
  sums_under_way[me] = sums_under_way[me] | (1 << landed[OTHER(me)]);
#else
  echo_under_way[me] = echo_under_way[me] + landed[OTHER(me)] - rows_told[me];
#endif
  rows_told[me] = landed[OTHER(me)]
}
inline hear(me) {
  echoed[OTHER(me)] = echoed[OTHER(me)] + echo_under_way[me];
  echo_under_way[me] = 0;
  forget(me)
}
/* Only differences of these numbers are looked at. Equal ones become 0, to keep the model small. */
inline forget(me) {
  if
  :: echoed[OTHER(me)] == rows_put[OTHER(me)] ->
    echoed[OTHER(me)] = 0;
    rows_put[OTHER(me)] = 0;
    rows_told[me] = 0;
    landed[OTHER(me)] = 0
  :: else
  fi
}

#define CAN_COMPUTE(me, row) \
  (RUNNING(me) && COUNT_IS_KNOWN(me) && row < ROWS_RECEIVED(me) && \
   arrived[OTHER(me) * ROWS + row] == epoch[me] && !computed[(me) * ROWS + row])
inline compute(me, row) {
  assert(row_here[AT(OTHER(me), DISPATCH, row)] == epoch[me]); /* this call's row */
  computed[(me) * ROWS + row] = true;
  stage(me, COMBINE, row)
}

#define CAN_COMBINE(me, row) \
  (RUNNING(me) && routed[me] && row < rows_sent[me] && !is_combined[(me) * ROWS + row] && \
   returned[OTHER(me) * ROWS + row] > 0)
inline combine(me, row) {
  assert(returned[OTHER(me) * ROWS + row] == 1);
  assert(row_here[AT(OTHER(me), COMBINE, row)] == epoch[me]); /* this call's result */
  returned[OTHER(me) * ROWS + row] = 0;
  is_combined[(me) * ROWS + row] = true;
  combined[me]++
}

#define IS_FINISHED(me) \
  (RUNNING(me) && routed[me] && COUNT_IS_KNOWN(me) && rows_returned[me] == ROWS_RECEIVED(me) && \
   combined[me] == rows_sent[me])
inline end(me) {
  epoch[me]++;
  assert(epoch[me] <= epoch[OTHER(me)] + 1); /* skew */
  routed[me] = false;
  rows_sent[me] = 0;
  tickets[me] = 0;
  next_request[me] = 0;
  rows_returned[me] = 0;
  combined[me] = 0;
  for (i : 0 .. ROWS - 1) {
    /* Of calls that are over, which one it was makes no difference: equal values keep the model
     * small. */
    arrived[OTHER(me) * ROWS + i] = (arrived[OTHER(me) * ROWS + i] < epoch[me] -> 1 : epoch[me]);
    row_staged[(me) * ROWS + i] = false;
    computed[(me) * ROWS + i] = false;
    is_combined[(me) * ROWS + i] = false
  }
  i = 0;
#ifdef MUTATION_ECHO_FORGOTTEN
  rows_told[me] = landed[OTHER(me)]
#endif
}

/* --- the arrangement: all actors of a rank beside each other, and the network from it --------- */

#define me _pid

#define ROW_STEPS(row) \
  :: d_step { \
    RUNNING(me) && routed[me] && row < rows_sent[me] && !row_staged[me * ROWS + row] -> \
    row_staged[me * ROWS + row] = true; \
    stage(me, DISPATCH, row) \
  } \
  :: d_step { CAN_COMPUTE(me, row) -> compute(me, row) } \
  :: d_step { CAN_COMBINE(me, row) -> combine(me, row) } \
  PUT_STEPS(DISPATCH, row) \
  PUT_STEPS(COMBINE, row)
#define PUT_STEPS(round, row) \
  :: d_step { bytes_under_way[AT(me, round, row)] != 0 -> arrive(me, round, row) } \
  SIGNAL_STEPS(round, row) \
  :: d_step { CAN_LAND(me, round, row) -> land(me, round, row) }
#ifdef MUTATION_SIGNAL_OVERTAKES
#define SIGNAL_STEPS(round, row) \
  :: d_step { signal_under_way[AT(me, round, row)] != 0 -> give_signal(me, round, row) }
#else
#define SIGNAL_STEPS(round, row)
#endif

#ifdef MUTATION_ECHO_IS_A_SUM
#define SUM_STEPS(sum) \
  :: d_step { \
    (sums_under_way[me] >> sum) & 1 -> \
    sums_under_way[me] = sums_under_way[me] ^ (1 << sum); \
    echoed[OTHER(me)] = sum \
  }
#define ECHO_STEPS SUM_STEPS(1) SUM_STEPS(2) SUM_STEPS(3) SUM_STEPS(4) SUM_STEPS(5) SUM_STEPS(6)
#else
#define ECHO_STEPS :: d_step { echo_under_way[me] != 0 -> hear(me) }
#endif

#define IS_SETTLED_IN(round, row) \
  (bytes_under_way[AT(me, round, row)] == 0 && signal_under_way[AT(me, round, row)] == 0 && \
   !landed_under_way[AT(me, round, row)])
#if ROWS > 1
#define IS_SETTLED(row) \
  (IS_SETTLED_IN(0, 0) && IS_SETTLED_IN(1, 0) && IS_SETTLED_IN(0, 1) && IS_SETTLED_IN(1, 1))
#else
#define IS_SETTLED(row) (IS_SETTLED_IN(0, row) && IS_SETTLED_IN(1, row))
#endif

active[2] proctype rank() {
  do
  :: atomic { RUNNING(me) && !routed[me] -> route(me) }
  :: d_step { count_here[me * 2] != count_put[me * 2] -> count_here[me * 2] = count_put[me * 2] }
  :: d_step {
    count_here[me * 2 + 1] != count_put[me * 2 + 1] ->
    count_here[me * 2 + 1] = count_put[me * 2 + 1]
  }
  ROW_STEPS(0)
#if ROWS > 1
  ROW_STEPS(1)
#endif
  :: d_step { HAS_REQUEST(me) && HAS_ROOM(me) -> put(me) }
  :: d_step { CAN_ECHO(me) -> echo(me) }
  ECHO_STEPS
  :: d_step { IS_FINISHED(me) -> end(me) }
  :: atomic {
    !RUNNING(me) && IS_SETTLED(0) && echo_under_way[me] == 0 && sums_under_way[me] == 0 &&
      count_here[me * 2] == count_put[me * 2] && count_here[me * 2 + 1] == count_put[me * 2 + 1] ->
    break
  }
  od
}
