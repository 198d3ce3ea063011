// SPDX-License-Identifier: Apache-2.0
/* Calls of the layer, one behind the other, among ranks that store into each other's heaps.
 *
 * What is modelled, and where it is in the code:
 *
 *   route            counts to every peer, zeros too            routing_finish.hpp assign_slots,
 *                                                              route_nothing
 *   deliver_count    a count word, stored relaxed, is seen      packet.hpp send_count
 *   write_rows       rows of a chunk into the owner's cell      warp_processor.hpp copy_rows,
 *                                                              kernels/sm90/move/courier.cuh copy_part
 *   send_flag        the chunk's flag, released                 packet.hpp send_chunk
 *   decode           counts of a source, bound on rows          counts_subscriber.hpp
 *   land             flag of a chunk, acquired; its list word   landings_subscriber.hpp
 *   copy_rows        tokens to the rows that were not sent      warp_processor.hpp replicate_rows,
 *                                                              kernels/sm90/move/courier.cuh landed_copy
 *   raise_flag       the chunk is whole, released               courier.hpp complete
 *   take_chunk       flag of a chunk, acquired; its tiles       arrivals_subscriber.hpp
 *   compute          one part of a tile: reads its row, writes  warp_processor.hpp Kernels
 *                    its columns of the result
 *   return_row       the credit, behind a fence                 packet.hpp return_rows
 *   take_credit      full credit: taken in, set back to 0       returns_subscriber.hpp
 *   combine          counts rows for the token; with the last   returns_subscriber.hpp count_rows,
 *                    its Combine, which reads all of them       kernels/sm90/combine/combine.cuh
 *   combine_unsent   a token without rows                       returns_subscriber.hpp hand_out_unsent
 *   read_epoch       a processor that has nothing to do starts  processor.hpp claim
 *   interrupt        the end of a call, the next epoch          scheduler.hpp finished, interrupt
 *   begin_call       all actors have left, the kernel ends      os.hpp begin_call
 *
 * Memory order. A row, or a column part of a result, is `written` by its writer, and that becomes
 * `visible` only with the next release of whoever wrote it or has acquired it; never before. (That
 * it may be visible sooner is covered by an assertion at the write: nobody may still need what was
 * there.) A reader sees of a row what was visible when it last acquired. A count word and the reset
 * of a credit are relaxed: they become visible at any time, the reset at the latest with the end of
 * the kernel. Words that publish are visible at once; that they are late is the same as if their
 * writer had been late.
 *
 * What is left out: the queues inside a rank (a task that is posted is run, by as many processors
 * as there are tasks, in any order), tiles of more than one row, experts (a rank's rows differ only
 * in their place), drops, failures (abort.pml), puts to remote peers (windows.pml), and rows from a
 * rank to itself unless WITH_SELF. The rows of a rank belong to one token, so Combine reads as late
 * as it ever can; a second token has no rows whenever there is a place left for one.
 *
 * With ONCE, two rows to a peer are so many that each token goes there once. The second row has the
 * first one's token, or another, which Combine does not tell apart. The first ONCE_AFTER chunks
 * bring all of their rows, say nothing of origins, and nobody copies any.
 *
 * The arrangement: each rank is one process whose steps come in any order, so all of its actors run
 * beside each other, or, with SWEEPS, three: an OS block that sweeps its actors in turn and
 * never waits, as run_os_block does, its processors, and its memory. Sweeps go round without end,
 * so there termination is a question of fairness, and not only of deadlock.
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef EPOCHS
#define EPOCHS 2 /* calls, of epochs 1 to EPOCHS */
#endif
#ifndef ROWS
#define ROWS 1 /* that a rank sends to a peer in a call, at most: 1 or 2 */
#endif
#ifndef CHUNK_ROWS
#define CHUNK_ROWS ROWS /* rows of a chunk: 1 or 2 */
#endif
#ifndef PARTS
#define PARTS 1 /* of a Product1 task: 1 or 2 */
#endif
#ifndef TOTAL_ROWS
#define TOTAL_ROWS (RANKS * ROWS) /* that a rank sends to all peers in a call, at most */
#endif

#define CHUNKS (ROWS / CHUNK_ROWS)
#define PAIRS (RANKS * RANKS)
#define PAIR(source, owner) ((source) * RANKS + (owner))
#define CHUNK(source, owner, chunk) (PAIR(source, owner) * CHUNKS + (chunk))
#define ROW(source, owner, row) (PAIR(source, owner) * ROWS + (row))
#define PART(source, owner, row, part) (ROW(source, owner, row) * PARTS + (part))

#ifdef WITH_SELF
#define SOURCES RANKS
#else
#define SOURCES (RANKS - 1)
#endif

#ifdef MUTATION_SINGLE_PARITY
#define PARITY(call) 0
#else
#define PARITY(call) ((call) % 2)
#endif
#define COUNT(source, owner, call) (PAIR(source, owner) * 2 + PARITY(call))

#ifdef ONCE
#define SENDS_ONCE(source, owner, rows) ((source) != (owner) && (rows) > 1)
#else
#define SENDS_ONCE(source, owner, rows) false
#endif
#ifndef ONCE_AFTER
#define ONCE_AFTER 0
#endif
#define BRINGS_ALL(chunk) ((chunk) < ONCE_AFTER)

/* A count word carries its epoch. */
#define COUNT_WORD(call, rows) ((call) * 4 + (rows))
#define EPOCH_OF(word) ((word) / 4)
#define ROWS_OF(word) ((word) % 4)

/* An origin is a row and nothing else; its call is for assertions. */
#define ORIGIN_WORD(call, row) ((call) * 2 + (row))
#define CALL_OF(word) ((word) / 2)
#define ORIGIN_OF(word) ((word) % 2)

/* --- the heaps ------------------------------------------------------------------------------- */

byte count_written[PAIRS * 2]; /* by the source, in the owner's heap */
byte count_visible[PAIRS * 2];
byte arrived[PAIRS * CHUNKS]; /* by the source, in the owner's heap: epoch */
byte returned[PAIRS * CHUNKS]; /* by the owner, in the source's heap: rows */
bool reset_pending[PAIRS * CHUNKS]; /* the source has stored a 0 there that is not visible yet */
byte origin_written[PAIRS * ROWS]; /* by the source, in the owner's heap */
byte origin_visible[PAIRS * ROWS];
byte origin_seen[PAIRS * ROWS]; /* by couriers */

/* Of a row, and of a part of its result, the call whose values are there. */
byte row_written[PAIRS * ROWS];
byte row_visible[PAIRS * ROWS];
byte row_landed[PAIRS * ROWS]; /* by couriers, from whoever has acquired the peer's flag */
byte row_seen[PAIRS * ROWS]; /* by whoever has acquired the flag */
byte result_written[PAIRS * ROWS * PARTS];
byte result_visible[PAIRS * ROWS * PARTS];
byte result_seen[PAIRS * ROWS * PARTS]; /* by whoever has acquired the credit */
/* Whoever must read what is there has not done so. Known to nobody: for assertions alone. */
byte row_needed[PAIRS * ROWS]; /* by so many: its tile, and who copies it */
bool origin_needed[PAIRS * ROWS];
bool result_needed[PAIRS * ROWS * PARTS];

/* --- what a rank knows by itself ------------------------------------------------------------- */

/* Algorithm 2's bound starts at "every cell is full". */
#ifdef MUTATION_BOUND_STARTS_EMPTY
#define BOUND_AT_FIRST 0
#else
#define BOUND_AT_FIRST (SOURCES * ROWS)
#endif

byte epoch[RANKS] = 1;      /* of the call that runs, or will run next: as its actors were told */
byte epoch_word[RANKS] = 1; /* the same in memory, for those who start */
byte late_epoch[RANKS]; /* what a processor without work has read there; 0: it has not started */
bool routed[RANKS];
bool over[RANKS]; /* interrupted: all actors leave */
byte rows_returned[RANKS];
byte rows_expected[RANKS] = BOUND_AT_FIRST; /* to be returned, at most */
byte rows_seen[RANKS];     /* the token's rows that are back */
bool token_combined[RANKS];
bool unsent_combined[RANKS];

byte rows_sent[PAIRS];
bool repeats[PAIRS]; /* the second row has the first one's token, and does not go */
byte total_sent[RANKS];
byte chunk_sent[PAIRS * CHUNKS]; /* 0, or: */
#define WRITTEN 1
#define FLAGGED 2
byte chunk_back[PAIRS * CHUNKS]; /* 0, or: */
#define POSTED 1
#define COUNTED 2

bool counts_known[PAIRS];
byte rows_received[PAIRS];
byte chunks_landed[PAIRS]; /* of a source that sends each token once */
byte chunk_whole[PAIRS * CHUNKS]; /* 0, or: */
#define LISTED 1
#define COPIED 2
byte replicated[PAIRS * CHUNKS]; /* epoch */
byte chunk_prefix[PAIRS]; /* chunks that have arrived, in order */
bool flag_missed[PAIRS * CHUNKS]; /* of a mutation */
byte tile[PAIRS * ROWS];     /* 0, or: */
#define ARRIVED 1
#define COMPUTED 2
#define RETURNED 3
bool part_done[PAIRS * ROWS * PARTS];
byte last_part[PAIRS * ROWS]; /* that has completed the tile */

byte finished = 0; /* ranks that have ended all of their calls */

hidden byte i;
hidden byte j;
hidden byte slot;

#define RUNNING(me) (epoch[me] <= EPOCHS && !over[me])
#define ROWS_IN_CHUNK(rows, chunk) \
  ((rows) <= (chunk) * CHUNK_ROWS \
       -> 0 \
       : ((rows) >= ((chunk) + 1) * CHUNK_ROWS -> CHUNK_ROWS : (rows) - (chunk) * CHUNK_ROWS))
#define IN_CHUNK(row, chunk) ((row) / CHUNK_ROWS == (chunk))

/* --- Route ----------------------------------------------------------------------------------- */

inline choose_rows(me, peer) {
  if
  :: rows_sent[PAIR(me, peer)] = 0
  :: total_sent[me] < TOTAL_ROWS -> rows_sent[PAIR(me, peer)] = 1
  :: ROWS > 1 && total_sent[me] + 1 < TOTAL_ROWS -> rows_sent[PAIR(me, peer)] = 2
  :: SENDS_ONCE(me, peer, ROWS) && total_sent[me] + 1 < TOTAL_ROWS ->
    rows_sent[PAIR(me, peer)] = 2;
    repeats[PAIR(me, peer)] = true
  fi;
  total_sent[me] = total_sent[me] + rows_sent[PAIR(me, peer)];
}

inline send_counts(me) {
  d_step {
    for (i : 0 .. RANKS - 1) {
      slot = COUNT(me, i, epoch[me]);
      if
#ifdef MUTATION_COUNT_OMITTED_WHEN_ZERO
      :: rows_sent[PAIR(me, i)] == 0 -> skip
#endif
      :: else -> count_written[slot] = COUNT_WORD(epoch[me], rows_sent[PAIR(me, i)])
      fi
    }
    i = 0;
    routed[me] = true;
#ifdef COARSE
    late_epoch[me] = epoch_word[me];
    unsent_combined[me] = true;
#endif
    if
    :: total_sent[me] == 0 -> token_combined[me] = true /* there is no such token */
    :: else
    fi;
    if
    :: total_sent[me] == TOTAL_ROWS -> unsent_combined[me] = true /* the same */
    :: else
    fi
  }
}

/* A count word, of this call or of the one before, becomes visible. */
#define COUNT_IS_UNDER_WAY(me, peer, parity) \
  (count_visible[PAIR(me, peer) * 2 + (parity)] != count_written[PAIR(me, peer) * 2 + (parity)])
inline deliver_count(me, peer, parity) {
  count_visible[PAIR(me, peer) * 2 + (parity)] = count_written[PAIR(me, peer) * 2 + (parity)];
}
#define NO_COUNT_IS_UNDER_WAY(me, peer) \
  (!COUNT_IS_UNDER_WAY(me, peer, 0) && !COUNT_IS_UNDER_WAY(me, peer, 1))

/* --- Dispatch -------------------------------------------------------------------------------- */

/* Which row holds each row's token, for a peer that gets it once. */
#define IS_REPEATED(me, peer, row) (repeats[PAIR(me, peer)] && (row) == 1)
inline write_origins(me, peer, chunk) {
  for (i : (chunk) * CHUNK_ROWS .. (chunk) * CHUNK_ROWS + CHUNK_ROWS - 1) {
    if
    :: SENDS_ONCE(me, peer, rows_sent[PAIR(me, peer)]) && !BRINGS_ALL(chunk) ->
      assert(!origin_needed[ROW(me, peer, i)]); /* not before a courier has read the one before */
      origin_written[ROW(me, peer, i)] =
        ORIGIN_WORD(epoch[me], (IS_REPEATED(me, peer, i) -> 0 : i));
      origin_needed[ROW(me, peer, i)] = true
    :: else
    fi
  }
  i = 0;
}
#ifdef MUTATION_ORIGINS_BEHIND_FLAG
#define CAN_WRITE_ORIGINS(me, peer, chunk) \
  (RUNNING(me) && chunk_sent[CHUNK(me, peer, chunk)] == FLAGGED && \
   SENDS_ONCE(me, peer, rows_sent[PAIR(me, peer)]) && \
   CALL_OF(origin_written[ROW(me, peer, (chunk) * CHUNK_ROWS)]) != epoch[me])
#endif

#define CAN_WRITE_ROWS(me, peer, chunk) \
  (RUNNING(me) && routed[me] && ROWS_IN_CHUNK(rows_sent[PAIR(me, peer)], chunk) > 0 && \
   chunk_sent[CHUNK(me, peer, chunk)] == 0)
inline write_rows(me, peer, chunk) {
#ifndef MUTATION_ORIGINS_BEHIND_FLAG
  write_origins(me, peer, chunk);
#endif
  for (i : (chunk) * CHUNK_ROWS .. (chunk) * CHUNK_ROWS + CHUNK_ROWS - 1) {
    if
    :: i < rows_sent[PAIR(me, peer)] && !IS_REPEATED(me, peer, i) ->
      assert(!row_needed[ROW(me, peer, i)]); /* not before the owner has read the one before */
      row_written[ROW(me, peer, i)] = epoch[me];
      row_needed[ROW(me, peer, i)] = 1 + repeats[PAIR(me, peer)]
    :: else
    fi
  }
  i = 0;
  chunk_sent[CHUNK(me, peer, chunk)] = WRITTEN;
}

#ifdef MUTATION_FLAG_BEFORE_DATA
#define CAN_SEND_FLAG(me, peer, chunk) \
  (RUNNING(me) && routed[me] && ROWS_IN_CHUNK(rows_sent[PAIR(me, peer)], chunk) > 0 && \
   arrived[CHUNK(me, peer, chunk)] != epoch[me])
#else
#define CAN_SEND_FLAG(me, peer, chunk) \
  (RUNNING(me) && chunk_sent[CHUNK(me, peer, chunk)] == WRITTEN)
#endif
inline send_flag(me, peer, chunk) {
#ifndef MUTATION_FLAG_RELAXED
  for (i : (chunk) * CHUNK_ROWS .. (chunk) * CHUNK_ROWS + CHUNK_ROWS - 1) {
    row_visible[ROW(me, peer, i)] = row_written[ROW(me, peer, i)];
    origin_visible[ROW(me, peer, i)] = origin_written[ROW(me, peer, i)]
  }
  i = 0;
#endif
  arrived[CHUNK(me, peer, chunk)] = epoch[me];
#ifdef MUTATION_FLAG_BEFORE_DATA
  if
  :: chunk_sent[CHUNK(me, peer, chunk)] == WRITTEN -> chunk_sent[CHUNK(me, peer, chunk)] = FLAGGED
  :: else
  fi
#else
  chunk_sent[CHUNK(me, peer, chunk)] = FLAGGED
#endif
}

/* --- the owner ------------------------------------------------------------------------------- */

#define CAN_DECODE(me, source) \
  (RUNNING(me) && !counts_known[PAIR(source, me)] && \
   EPOCH_OF(count_visible[COUNT(source, me, epoch[me])]) == epoch[me])
inline decode(me, source) {
  rows_received[PAIR(source, me)] = ROWS_OF(count_visible[COUNT(source, me, epoch[me])]);
  counts_known[PAIR(source, me)] = true;
#ifdef MUTATION_BOUND_STARTS_EMPTY
  rows_expected[me] = rows_expected[me] + rows_received[PAIR(source, me)];
#else
  rows_expected[me] = rows_expected[me] - (ROWS - rows_received[PAIR(source, me)]);
#endif
}

#ifdef MUTATION_OWN_ROWS_COPIED
#define CAME_ONCE(me, source) (rows_received[PAIR(source, me)] > 1)
#else
#define CAME_ONCE(me, source) SENDS_ONCE(source, me, rows_received[PAIR(source, me)])
#endif
#ifdef MUTATION_LANDS_IN_ANY_ORDER
#define IS_NEXT_TO_LAND(me, source, chunk) (chunk_whole[CHUNK(source, me, chunk)] == 0)
#else
#define IS_NEXT_TO_LAND(me, source, chunk) (chunks_landed[PAIR(source, me)] == (chunk))
#endif
#define CAN_LAND(me, source, chunk) \
  (RUNNING(me) && counts_known[PAIR(source, me)] && CAME_ONCE(me, source) && \
   IS_NEXT_TO_LAND(me, source, chunk) && arrived[CHUNK(source, me, chunk)] == epoch[me])
inline land(me, source, chunk) {
  for (i : (chunk) * CHUNK_ROWS .. (chunk) * CHUNK_ROWS + CHUNK_ROWS - 1) {
    row_landed[ROW(source, me, i)] = row_visible[ROW(source, me, i)];
    origin_seen[ROW(source, me, i)] = origin_visible[ROW(source, me, i)]
  }
  i = 0;
  chunks_landed[PAIR(source, me)] = chunks_landed[PAIR(source, me)] + 1;
  chunk_whole[CHUNK(source, me, chunk)] = (BRINGS_ALL(chunk) -> 0 : LISTED);
}

#define CAN_COPY_ROWS(me, source, chunk) \
  (RUNNING(me) && chunk_whole[CHUNK(source, me, chunk)] == LISTED)
inline copy_rows(me, source, chunk) {
  for (i : (chunk) * CHUNK_ROWS .. (chunk) * CHUNK_ROWS + CHUNK_ROWS - 1) {
    assert(CALL_OF(origin_seen[ROW(source, me, i)]) == epoch[me]); /* this call's origin */
    origin_needed[ROW(source, me, i)] = false;
    j = ORIGIN_OF(origin_seen[ROW(source, me, i)]);
    if
    :: j != i ->
      assert(row_landed[ROW(source, me, j)] == epoch[me]); /* this call's row, which has landed */
      assert(!row_needed[ROW(source, me, i)]); /* not before our tile has read the one before */
      row_written[ROW(source, me, i)] = row_landed[ROW(source, me, j)];
      row_needed[ROW(source, me, i)] = 1;
      row_needed[ROW(source, me, j)] = row_needed[ROW(source, me, j)] - 1
    :: else
    fi
  }
  i = 0;
  j = 0;
  chunk_whole[CHUNK(source, me, chunk)] = COPIED;
}

#ifdef MUTATION_RAISED_BEFORE_COPY
#define WHOLE_ENOUGH LISTED
#else
#define WHOLE_ENOUGH COPIED
#endif
#define CAN_RAISE_FLAG(me, source, chunk) \
  (RUNNING(me) && chunk_whole[CHUNK(source, me, chunk)] >= WHOLE_ENOUGH && \
   replicated[CHUNK(source, me, chunk)] != epoch[me])
inline raise_flag(me, source, chunk) {
#ifndef MUTATION_RAISED_RELAXED
  for (i : (chunk) * CHUNK_ROWS .. (chunk) * CHUNK_ROWS + CHUNK_ROWS - 1) {
    row_visible[ROW(source, me, i)] = row_written[ROW(source, me, i)]
  }
  i = 0;
#endif
  replicated[CHUNK(source, me, chunk)] = epoch[me];
}

/* The first chunk that has not arrived. */
#define NEXT_CHUNK(me, source) CHUNK(source, me, chunk_prefix[PAIR(source, me)])
#define MORE_CHUNKS(me, source) \
  (chunk_prefix[PAIR(source, me)] * CHUNK_ROWS < rows_received[PAIR(source, me)])
#if defined(MUTATION_COPIES_NOT_AWAITED)
#define AWAITS_COPIES(me, source) false
#elif defined(MUTATION_ORIGINS_NOT_AWAITED)
#define AWAITS_COPIES(me, source) (repeats[PAIR(source, me)]) /* only where there are copies */
#else
#define AWAITS_COPIES(me, source) CAME_ONCE(me, source)
#endif
#ifdef MUTATION_COPIES_AWAITED_IN_VAIN
#define NEEDS_COPIES(me, source) AWAITS_COPIES(me, source)
#else
#define NEEDS_COPIES(me, source) \
  (AWAITS_COPIES(me, source) && !BRINGS_ALL(chunk_prefix[PAIR(source, me)]))
#endif
#define FLAG(me, source) \
  (NEEDS_COPIES(me, source) -> replicated[NEXT_CHUNK(me, source)] \
                            : arrived[NEXT_CHUNK(me, source)])
#ifdef MUTATION_FLAG_WITHOUT_EPOCH
#define FLAG_IS_HERE(me, source) (FLAG(me, source) != 0)
#else
#define FLAG_IS_HERE(me, source) (FLAG(me, source) == epoch[me])
#endif
#ifdef MUTATION_FLAG_LOOKED_AT_ONCE
/* A subscriber that a flag wakes, once, and that does nothing where the counts are not known. */
#define IS_MISSED(me, source) (flag_missed[NEXT_CHUNK(me, source)])
#define CAN_MISS(me, source) \
  (RUNNING(me) && !counts_known[PAIR(source, me)] && FLAG_IS_HERE(me, source))
#else
#define IS_MISSED(me, source) false
#define CAN_MISS(me, source) false
#endif
inline miss(me, source) {
  flag_missed[NEXT_CHUNK(me, source)] = true
}
#define CAN_TAKE_CHUNK(me, source) \
  (RUNNING(me) && counts_known[PAIR(source, me)] && MORE_CHUNKS(me, source) && \
   FLAG_IS_HERE(me, source) && !IS_MISSED(me, source))
inline take_chunk(me, source) {
  for (i : chunk_prefix[PAIR(source, me)] * CHUNK_ROWS
           .. chunk_prefix[PAIR(source, me)] * CHUNK_ROWS + CHUNK_ROWS - 1) {
#ifndef MUTATION_ACQUIRE_DROPPED
    row_seen[ROW(source, me, i)] = row_visible[ROW(source, me, i)];
#endif
    if
    :: i < rows_received[PAIR(source, me)] -> tile[ROW(source, me, i)] = ARRIVED
    :: else
    fi
  }
  i = 0;
  chunk_prefix[PAIR(source, me)] = chunk_prefix[PAIR(source, me)] + 1;
}

#define CAN_COMPUTE(me, source, row, part) \
  (RUNNING(me) && tile[ROW(source, me, row)] == ARRIVED && !part_done[PART(source, me, row, part)])
inline compute(me, source, row, part) {
  /* This call's row, neither older nor newer; and not before Combine has read the last result. */
  assert(row_seen[ROW(source, me, row)] == epoch[me]);
  assert(!result_needed[PART(source, me, row, part)]);
  result_written[PART(source, me, row, part)] = row_seen[ROW(source, me, row)];
  result_needed[PART(source, me, row, part)] = true;
  part_done[PART(source, me, row, part)] = true;
  if
  :: PARTS == 1 || part_done[PART(source, me, row, (part + 1) % PARTS)] ->
    /* The part that completes the tile; no tile reads the row again. */
    row_needed[ROW(source, me, row)] = row_needed[ROW(source, me, row)] - 1;
    last_part[ROW(source, me, row)] = part;
    tile[ROW(source, me, row)] = COMPUTED
  :: else
  fi
}

#ifdef MUTATION_PADDING_CREDITED
#define CREDIT_OF_ROW 2
#else
#define CREDIT_OF_ROW 1
#endif
#define CHUNK_OF_ROW(source, owner, row) CHUNK(source, owner, (row) / CHUNK_ROWS)
#define CAN_RETURN_ROW(me, source, row) (RUNNING(me) && tile[ROW(source, me, row)] == COMPUTED)
inline return_row(me, source, row) {
#ifndef MUTATION_CREDIT_RELAXED
  for (i : 0 .. PARTS - 1) {
    if
#ifdef MUTATION_PARTS_COUNTED_RELAXED
    /* Whoever counts last has not acquired the other parts, so its release does not cover them. */
    :: i != last_part[ROW(source, me, row)] -> skip
#endif
    :: else ->
      result_visible[PART(source, me, row, i)] = result_written[PART(source, me, row, i)]
    fi
  }
  i = 0;
#endif
  returned[CHUNK_OF_ROW(source, me, row)] = returned[CHUNK_OF_ROW(source, me, row)] + CREDIT_OF_ROW;
  rows_returned[me] = rows_returned[me] + 1;
  tile[ROW(source, me, row)] = RETURNED;
}

/* --- the source again ------------------------------------------------------------------------ */

/* What the returns subscriber reads: its own store of 0 is the newest it knows, visible or not. */
#define CAN_TAKE_CREDIT(me, peer, chunk) \
  (RUNNING(me) && routed[me] && chunk_back[CHUNK(me, peer, chunk)] == 0 && \
   ROWS_IN_CHUNK(rows_sent[PAIR(me, peer)], chunk) > 0 && \
   !reset_pending[CHUNK(me, peer, chunk)] && \
   returned[CHUNK(me, peer, chunk)] >= ROWS_IN_CHUNK(rows_sent[PAIR(me, peer)], chunk))
inline take_credit(me, peer, chunk) {
  /* No row is credited twice, and none of an earlier call is left. */
  assert(returned[CHUNK(me, peer, chunk)] == ROWS_IN_CHUNK(rows_sent[PAIR(me, peer)], chunk));
  for (i : (chunk) * CHUNK_ROWS * PARTS .. ((chunk) + 1) * CHUNK_ROWS * PARTS - 1) {
    result_seen[PART(me, peer, 0, i)] = result_visible[PART(me, peer, 0, i)]
  }
  i = 0;
#ifndef MUTATION_CREDIT_NOT_RESET
  reset_pending[CHUNK(me, peer, chunk)] = true;
#endif
  chunk_back[CHUNK(me, peer, chunk)] = POSTED;
}
/* The 0 becomes visible, in place of whatever has been added there meanwhile. */
inline deliver_reset(me, peer, chunk) {
  returned[CHUNK(me, peer, chunk)] = 0;
  reset_pending[CHUNK(me, peer, chunk)] = false;
}

#define CAN_COMBINE(me, peer, chunk) \
  (RUNNING(me) && chunk_back[CHUNK(me, peer, chunk)] == POSTED)
inline combine(me, peer, chunk) {
  chunk_back[CHUNK(me, peer, chunk)] = COUNTED;
  rows_seen[me] = rows_seen[me] + ROWS_IN_CHUNK(rows_sent[PAIR(me, peer)], chunk);
  if
  :: rows_seen[me] == total_sent[me] -> /* the token's last row: reads all of them */
    for (i : 0 .. RANKS - 1) {
      for (j : 0 .. ROWS * PARTS - 1) {
        if
        :: j < rows_sent[PAIR(me, i)] * PARTS ->
          assert(result_seen[PART(me, i, 0, j)] == epoch[me]); /* this call's result */
          result_needed[PART(me, i, 0, j)] = false
        :: else
        fi
      }
    }
    i = 0;
    j = 0;
    token_combined[me] = true
  :: else
  fi
}

#ifdef MUTATION_UNSENT_NOT_POSTED
#define CAN_COMBINE_UNSENT(me) false
#else
#define CAN_COMBINE_UNSENT(me) (RUNNING(me) && routed[me] && !unsent_combined[me])
#endif

/* --- the end of a call ----------------------------------------------------------------------- */

#define CAN_READ_EPOCH(me) (epoch[me] <= EPOCHS && late_epoch[me] == 0)

#ifdef MUTATION_EPOCH_ADVANCED_EARLY
#define PROCESSORS_ARE_BACK(me) true
#else
#define PROCESSORS_ARE_BACK(me) (late_epoch[me] != 0)
#endif
#ifdef MUTATION_ENDS_BEFORE_RETURNED
#define ALL_IS_RETURNED(me) true
#else
#define ALL_IS_RETURNED(me) (rows_returned[me] == rows_expected[me])
#endif
#if defined(MUTATION_ENDS_WHEN_SENT)
#define ALL_IS_COMBINED(me) CHUNKS_ARE(me, chunk_sent, FLAGGED)
#elif defined(MUTATION_ENDS_WHEN_POSTED)
#define ALL_IS_COMBINED(me) CHUNKS_ARE(me, chunk_back, POSTED)
#else
#define ALL_IS_COMBINED(me) (token_combined[me] && unsent_combined[me])
#endif
/* Of mutations, in a world of two ranks with one chunk: the peer's is so far, or there is none. */
#define CHUNKS_ARE(me, state, so_far) \
  (rows_sent[PAIR(me, 1 - (me))] == 0 || state[CHUNK(me, 1 - (me), 0)] >= so_far)
#define IS_FINISHED(me) \
  (RUNNING(me) && routed[me] && ALL_IS_RETURNED(me) && ALL_IS_COMBINED(me) && \
   PROCESSORS_ARE_BACK(me))
inline interrupt(me) {
  epoch_word[me] = epoch[me] + 1;
  over[me] = true;
}

/* Values of calls that are over are only compared with later epochs, so which call they are of
 * makes no difference, and they are made equal: flags become those of call 1, and counts, and rows
 * that have been read, nobody's. This is of the model alone, and keeps it small. */
inline forget(me) {
  for (i : 0 .. RANKS - 1) {
    for (j : PAIR(i, me) * 2 .. PAIR(i, me) * 2 + 1) {
      if
      :: count_visible[j] == count_written[j] && EPOCH_OF(count_written[j]) <= epoch[me] ->
        count_visible[j] = 0;
        count_written[j] = 0
      :: else
      fi
    }
    for (j : 0 .. CHUNKS - 1) {
      if
      :: arrived[CHUNK(i, me, j)] <= epoch[me] ->
        arrived[CHUNK(i, me, j)] = 1
      :: else
      fi;
      replicated[CHUNK(i, me, j)] = 1
    }
    for (j : 0 .. ROWS - 1) {
      row_landed[ROW(i, me, j)] = 0;
      row_seen[ROW(i, me, j)] = 0;
      origin_seen[ROW(i, me, j)] = 0;
      if
      :: !origin_needed[ROW(i, me, j)] ->
        origin_written[ROW(i, me, j)] = 0;
        origin_visible[ROW(i, me, j)] = 0
      :: else
      fi;
      if
      :: !row_needed[ROW(i, me, j)] ->
        row_written[ROW(i, me, j)] = 0;
        row_visible[ROW(i, me, j)] = 0
      :: else
      fi
    }
    for (j : 0 .. ROWS * PARTS - 1) {
      result_seen[PART(me, i, 0, j)] = 0;
      if
      :: !result_needed[PART(me, i, 0, j)] ->
        result_written[PART(me, i, 0, j)] = 0;
        result_visible[PART(me, i, 0, j)] = 0
      :: else
      fi
    }
  }
}

/* All actors have left; one that took the next call's epoch for this one's never does. */
#define CAN_BEGIN_CALL(me) (over[me] && late_epoch[me] == epoch[me])
inline begin_call(me) {
  forget(me);
  for (i : 0 .. RANKS - 1) {
    for (j : 0 .. CHUNKS - 1) {
#ifndef MUTATION_KERNEL_BOUNDARY_ORDERS_NOTHING
      if
      :: reset_pending[CHUNK(me, i, j)] -> deliver_reset(me, i, j)
      :: else
      fi;
#endif
      chunk_sent[CHUNK(me, i, j)] = 0;
      chunk_back[CHUNK(me, i, j)] = 0;
      chunk_whole[CHUNK(i, me, j)] = 0;
      flag_missed[CHUNK(i, me, j)] = false
    }
    for (j : 0 .. ROWS - 1) {
      tile[ROW(i, me, j)] = 0;
      last_part[ROW(i, me, j)] = 0
    }
    for (j : 0 .. ROWS * PARTS - 1) {
      part_done[PART(i, me, 0, j)] = false
    }
    rows_sent[PAIR(me, i)] = 0;
    repeats[PAIR(me, i)] = false;
    counts_known[PAIR(i, me)] = false;
    rows_received[PAIR(i, me)] = 0;
    chunks_landed[PAIR(i, me)] = 0;
    chunk_prefix[PAIR(i, me)] = 0
  }
  routed[me] = false;
  over[me] = false;
  late_epoch[me] = 0;
  rows_returned[me] = 0;
  rows_expected[me] = (epoch[me] < EPOCHS -> BOUND_AT_FIRST : 0);
  rows_seen[me] = 0;
  total_sent[me] = 0;
  token_combined[me] = false;
  unsent_combined[me] = false;
  epoch[me] = epoch[me] + 1;
  for (i : 0 .. RANKS - 1) {
    assert(epoch[me] <= epoch[i] + 1) /* skew */
  }
  i = 0;
  j = 0;
}

/* --- the arrangement ------------------------------------------------------------------------- */

/* peer(1) to peer(SOURCES): the next ranks, and at last this one */
#define PEER(distance) ((me + (distance)) % RANKS)

#define MEMORY_OF(peer) \
  :: d_step { COUNT_IS_UNDER_WAY(me, peer, 0) -> deliver_count(me, peer, 0) } \
  :: d_step { COUNT_IS_UNDER_WAY(me, peer, 1) -> deliver_count(me, peer, 1) } \
  RESETS_OF(peer)
#ifdef MUTATION_KERNEL_BOUNDARY_ORDERS_NOTHING
#define RESETS_OF(peer) \
  :: d_step { reset_pending[CHUNK(me, peer, 0)] -> deliver_reset(me, peer, 0) }
#else
#define RESETS_OF(peer) /* at the latest time there is: a credit added before it would be lost */
#endif

#ifdef MUTATION_ORIGINS_BEHIND_FLAG
#define LATE_ORIGINS(peer, chunk) \
  :: d_step { \
    CAN_WRITE_ORIGINS(me, peer, chunk) -> \
    write_origins(me, peer, chunk); \
    send_flag(me, peer, chunk) \
  }
#else
#define LATE_ORIGINS(peer, chunk)
#endif
#define CHUNK_BY_PROCESSORS(peer, chunk) \
  :: d_step { CAN_WRITE_ROWS(me, peer, chunk) -> write_rows(me, peer, chunk) } \
  :: d_step { CAN_SEND_FLAG(me, peer, chunk) -> send_flag(me, peer, chunk) } \
  LATE_ORIGINS(peer, chunk) \
  :: d_step { CAN_COPY_ROWS(me, peer, chunk) -> copy_rows(me, peer, chunk) } \
  :: d_step { CAN_RAISE_FLAG(me, peer, chunk) -> raise_flag(me, peer, chunk) } \
  :: d_step { CAN_COMBINE(me, peer, chunk) -> combine(me, peer, chunk) }
#define PART_BY_PROCESSORS(peer, row, part) \
  :: d_step { CAN_COMPUTE(me, peer, row, part) -> compute(me, peer, row, part) }
#if PARTS > 1
#define ROW_BY_PROCESSORS(peer, row) \
  PART_BY_PROCESSORS(peer, row, 0) \
  PART_BY_PROCESSORS(peer, row, 1) \
  :: d_step { CAN_RETURN_ROW(me, peer, row) -> return_row(me, peer, row) }
#else
#define ROW_BY_PROCESSORS(peer, row) \
  PART_BY_PROCESSORS(peer, row, 0) \
  :: d_step { CAN_RETURN_ROW(me, peer, row) -> return_row(me, peer, row) }
#endif
#if ROWS > 1
#define ROWS_BY_PROCESSORS(peer) ROW_BY_PROCESSORS(peer, 0) ROW_BY_PROCESSORS(peer, 1)
#else
#define ROWS_BY_PROCESSORS(peer) ROW_BY_PROCESSORS(peer, 0)
#endif
#define LANDING(peer, chunk) :: d_step { CAN_LAND(me, peer, chunk) -> land(me, peer, chunk) }
#define CREDIT(peer, chunk) \
  :: d_step { CAN_TAKE_CREDIT(me, peer, chunk) -> take_credit(me, peer, chunk) }
#if ROWS > CHUNK_ROWS
#define PROCESSORS_FOR(peer) \
  CHUNK_BY_PROCESSORS(peer, 0) CHUNK_BY_PROCESSORS(peer, 1) ROWS_BY_PROCESSORS(peer)
#define LANDINGS(peer) LANDING(peer, 0) LANDING(peer, 1)
#define CREDITS(peer) CREDIT(peer, 0) CREDIT(peer, 1)
#else
#define PROCESSORS_FOR(peer) CHUNK_BY_PROCESSORS(peer, 0) ROWS_BY_PROCESSORS(peer)
#define LANDINGS(peer) LANDING(peer, 0)
#define CREDITS(peer) CREDIT(peer, 0)
#endif

#ifdef MUTATION_FLAG_LOOKED_AT_ONCE
#define MISSES(peer) :: d_step { CAN_MISS(me, peer) -> miss(me, peer) }
#else
#define MISSES(peer)
#endif
/* The code refuses a count of a call that is later than the one that runs: nobody can be so far. */
#define HAS_LATER_COUNT(me, source) \
  (RUNNING(me) && !counts_known[PAIR(source, me)] && \
   EPOCH_OF(count_visible[COUNT(source, me, epoch[me])]) > epoch[me])
#define REFUSE_LATER_COUNT(peer) \
  :: d_step { HAS_LATER_COUNT(me, peer) -> assert(!HAS_LATER_COUNT(me, peer)) }
#define SUBSCRIBERS_FOR(peer) \
  REFUSE_LATER_COUNT(peer) \
  :: d_step { CAN_DECODE(me, peer) -> decode(me, peer) } \
  LANDINGS(peer) \
  :: d_step { CAN_TAKE_CHUNK(me, peer) -> take_chunk(me, peer) } \
  CREDITS(peer) \
  MISSES(peer)

#if RANKS == 3
#define LAST_PEER PEER(2)
#define FOR_PEERS(STEPS) STEPS(PEER(1)) STEPS(PEER(2))
inline choose_all_rows(me) {
  choose_rows(me, PEER(1));
  choose_rows(me, PEER(2));
}
#define NOTHING_IS_UNDER_WAY \
  (NO_COUNT_IS_UNDER_WAY(me, PEER(1)) && NO_COUNT_IS_UNDER_WAY(me, PEER(2)))
#elif defined(WITH_SELF)
#define FOR_PEERS(STEPS) STEPS(PEER(1)) STEPS(me)
inline choose_all_rows(me) {
  choose_rows(me, PEER(1));
  choose_rows(me, me);
}
#define NOTHING_IS_UNDER_WAY \
  (NO_COUNT_IS_UNDER_WAY(me, PEER(1)) && NO_COUNT_IS_UNDER_WAY(me, me))
#else
#define FOR_PEERS(STEPS) STEPS(PEER(1))
inline choose_all_rows(me) {
  choose_rows(me, PEER(1));
}
#define NOTHING_IS_UNDER_WAY NO_COUNT_IS_UNDER_WAY(me, PEER(1))
#endif

#define ROUTE \
  :: atomic { RUNNING(me) && !routed[me] -> choose_all_rows(me); send_counts(me) }

/* Steps that nobody else can see between are one; for one row to a peer. A row that is written and
 * not announced is as one that is not written, a count that nobody has looked at as one that is
 * under way, and what an actor has learnt and not acted on as what it has not learnt. */
#ifdef COARSE

#define RECEIVE_COUNT(peer, parity) \
  :: d_step { \
    RUNNING(me) && COUNT_IS_UNDER_WAY(peer, me, parity) && \
      EPOCH_OF(count_written[PAIR(peer, me) * 2 + (parity)]) == epoch[me] -> \
    deliver_count(peer, me, parity); \
    decode(me, peer) \
  }
#define COARSE_STEPS_FOR(peer) \
  RECEIVE_COUNT(peer, 0) \
  RECEIVE_COUNT(peer, 1) \
  :: d_step { CAN_WRITE_ROWS(me, peer, 0) -> write_rows(me, peer, 0); send_flag(me, peer, 0) } \
  :: d_step { \
    CAN_TAKE_CHUNK(me, peer) -> \
    take_chunk(me, peer); \
    compute(me, peer, 0, 0); \
    return_row(me, peer, 0) \
  } \
  :: d_step { CAN_TAKE_CREDIT(me, peer, 0) -> take_credit(me, peer, 0); combine(me, peer, 0) }
#define STEPS \
  ROUTE \
  FOR_PEERS(COARSE_STEPS_FOR) \
  :: d_step { \
    IS_FINISHED(me) -> \
    interrupt(me); \
    begin_call(me) \
  }

#else

#define PROCESSORS \
  ROUTE \
  FOR_PEERS(PROCESSORS_FOR) \
  :: d_step { CAN_COMBINE_UNSENT(me) -> unsent_combined[me] = true } \
  :: d_step { CAN_READ_EPOCH(me) -> late_epoch[me] = epoch_word[me] }
#define OS_BLOCK \
  FOR_PEERS(SUBSCRIBERS_FOR) \
  :: d_step { IS_FINISHED(me) -> interrupt(me) } \
  :: d_step { CAN_BEGIN_CALL(me) -> begin_call(me) }
#define STEPS \
  PROCESSORS \
  OS_BLOCK \
  FOR_PEERS(MEMORY_OF)

#endif

#define ALL_CALLS_ARE_OVER (epoch[me] > EPOCHS)

#ifdef SWEEPS

/* One sweep looks at everything once, and goes on whether there was anything or not. */
#define LOOK(condition, step) \
  if \
  :: condition -> step \
  :: else \
  fi;
#define SWEEP_OVER(peer) \
  LOOK(CAN_MISS(me, peer), miss(me, peer)) \
  LOOK(CAN_DECODE(me, peer), decode(me, peer)) \
  LOOK(CAN_LAND(me, peer, 0), land(me, peer, 0)) \
  LOOK(CAN_TAKE_CHUNK(me, peer), take_chunk(me, peer)) \
  LOOK(CAN_TAKE_CREDIT(me, peer, 0), take_credit(me, peer, 0))
#define me _pid
active[RANKS] proctype os_block() {
  do
  :: d_step {
    !ALL_CALLS_ARE_OVER ->
    LOOK(IS_FINISHED(me), interrupt(me))
    LOOK(CAN_BEGIN_CALL(me), begin_call(me))
    FOR_PEERS(SWEEP_OVER)
    skip
  }
  :: ALL_CALLS_ARE_OVER -> break
  od;
  finished++
}
#undef me

#define me (_pid - RANKS)
active[RANKS] proctype processors() {
  do
  PROCESSORS
  :: ALL_CALLS_ARE_OVER -> break
  od
}
#undef me

#define me (_pid - 2 * RANKS)
active[RANKS] proctype memory() {
  do
  FOR_PEERS(MEMORY_OF)
  :: ALL_CALLS_ARE_OVER && NOTHING_IS_UNDER_WAY -> break
  od
}
#undef me

ltl termination { <> (finished == RANKS) }

#else

#define me _pid
active[RANKS] proctype rank() {
  do
  STEPS
  :: ALL_CALLS_ARE_OVER && NOTHING_IS_UNDER_WAY -> break
  od
}

#endif
