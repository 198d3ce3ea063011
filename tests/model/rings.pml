// SPDX-License-Identifier: Apache-2.0
/* Cells of which a source uses places again, as those of a ring, within a call. Is nothing
 * overwritten that somebody must still read, and does everybody get on?
 *
 * What is modelled, and where it is in the code:
 *
 *   courier        takes the next part; keeps it until the    courier.hpp take_dispatch, has_places
 *                  row that had its place is back
 *   write          the row to its place, and behind the       warp_processor.hpp copy_rows,
 *                  ring, if a tile may go on there            kernels/sm90/move/courier.cuh run_courier
 *   make           a tile of one source's rows, or of what    tile_plan.hpp plan, is_apart
 *                  is left of it
 *   compute        reads the tile's rows side by side         kernels/twin/kernels.hpp
 *   give_back      its credits, behind all reads              packet.hpp return_rows,
 *                                                             returns_subscriber.hpp take_in
 *
 * Each rank sends as many rows to every rank, itself the last. Chunks and parts are a row. The first
 * row is all that one expert gets of a source. The others are another expert's: full tiles of two
 * rows, which begin at the ring's last place and end behind it. What is left out: memory order
 * (tests/native/test_ordered.py), Combine, the window of puts (windows.pml), and how processors
 * share parts: whatever is made may be computed at any time, in any order (exchange.pml, pool.pml).
 */

#ifndef RANKS
#define RANKS 2
#endif
#ifndef COURIERS
#define COURIERS 1 /* of a rank */
#endif
/* COARSE: what a courier or a tile does is one step. */
#ifndef ROWS
#define ROWS 5 /* for each rank: 1, and then whole tiles */
#endif

#define RING 2
#define TILE 2
#define PLACES (RING + TILE)
#define TILES (1 + (ROWS - 1) / TILE)
#define PAIR(source, owner) ((source) * RANKS + (owner))
#define ROW(source, owner, row) (PAIR(source, owner) * ROWS + (row))
#define PLACE(source, owner, place) (PAIR(source, owner) * PLACES + (place))
#define TILE_OF(source, owner, tile) (PAIR(source, owner) * TILES + (tile))

#define FIRST(tile) ((tile) == 0 -> 0 : 1 + ((tile) - 1) * TILE)
#define END(tile) (1 + (tile) * TILE)

#define PARTS (RANKS * ROWS)
#define PEER(source, part) (((source) + 1 + (part) / ROWS) % RANKS)

byte taken[RANKS];                 /* parts of the list */
byte at[RANKS * RANKS * PLACES];   /* 1 and the row that is there */
bool needed[RANKS * RANKS * PLACES]; /* a tile must still read it there */
bool here[RANKS * RANKS * ROWS];
bool back[RANKS * RANKS * ROWS];

#ifdef MUTATION_PLACES_NOT_AWAITED
#define HAS_PLACE(source, owner, row) true
#else
#define HAS_PLACE(source, owner, row) \
  ((row) < RING || back[ROW(source, owner, (row) < RING -> 0 : (row) - RING)])
#endif

/* Which place its tile reads a row from: the first row of a tile is in the ring. */
#define READ_AT(row) ((row) == 0 -> 0 : (((row) - 1) % TILE == 0 -> (row) % RING : \
                      ((row) - 1) % RING + 1))

proctype courier(byte me) {
  byte part = 0;
  byte peer = 0;
  byte row = 0;
  do
  :: d_step {
       taken[me] < PARTS ->
       part = taken[me];
       peer = PEER(me, part);
       row = part % ROWS;
       taken[me]++
     }
     HAS_PLACE(me, peer, row);
     d_step {
       assert(!needed[PLACE(me, peer, row % RING)]);
       at[PLACE(me, peer, row % RING)] = 1 + row;
#ifndef MUTATION_TAILS_STAY_OLD
       if
       :: row >= RING ->
          assert(!needed[PLACE(me, peer, RING + row % RING)]);
          at[PLACE(me, peer, RING + row % RING)] = 1 + row
       :: else
       fi;
#endif
       needed[PLACE(me, peer, READ_AT(row))] = true
#ifdef COARSE
       ;
#else
     }
     d_step {
#endif
       here[ROW(me, peer, row)] = true;
       part = 0;
       peer = 0;
       row = 0
     }
  :: taken[me] >= PARTS -> break
  od
}

#if defined(MUTATION_REMAINDERS_WAIT) && RANKS == 2
#define MAY_MERGE(owner) (here[ROW(0, owner, 0)] && here[ROW(1, owner, 0)])
#elif defined(MUTATION_REMAINDERS_WAIT)
#define MAY_MERGE(owner) \
  (here[ROW(0, owner, 0)] && here[ROW(1, owner, 0)] && here[ROW(2, owner, 0)])
#else
#define MAY_MERGE(owner) true
#endif

/* Makes a tile, computes it and gives its rows back. */
proctype tile(byte source, me, number) {
  byte row = 0;
  here[ROW(source, me, FIRST(number))] && here[ROW(source, me, END(number) - 1)];
  (number > 0 || MAY_MERGE(me));
  d_step {
    row = FIRST(number);
    do
    :: row < END(number) ->
       assert(at[PLACE(source, me, FIRST(number) % RING + row - FIRST(number))] == 1 + row);
       needed[PLACE(source, me, FIRST(number) % RING + row - FIRST(number))] = false;
       row++
    :: else -> break
    od;
#ifndef COARSE
    row = 0
  }
  d_step {
#endif
    row = FIRST(number);
    do
    :: row < END(number) -> back[ROW(source, me, row)] = true; row++
    :: else -> break
    od;
    row = 0
  }
}

/* A processor of a rank that is planned up front: it waits for the rows of its next part, and other
 * parts wait behind it. */
proctype processor(byte me) {
  byte number = 0;
  byte source = 0;
  byte row = 0;
  do
  :: number < TILES ->
     here[ROW(source, me, FIRST(number))] && here[ROW(source, me, END(number) - 1)];
     d_step {
       row = FIRST(number);
       do
       :: row < END(number) ->
          needed[PLACE(source, me, READ_AT(row))] = false;
          back[ROW(source, me, row)] = true;
          row++
       :: else -> break
       od;
       row = 0;
       source++;
       if
       :: source == RANKS -> source = 0; number++
       :: else
       fi
     }
  :: number == TILES -> break
  od
}

init {
  byte me = 0;
  byte source = 0;
  byte n = 0;
  atomic {
    do
    :: me < RANKS ->
       do
       :: n < COURIERS -> run courier(me); n++
       :: else -> break
       od;
       n = 0;
#ifdef MUTATION_PLANNED_UP_FRONT
       run processor(me);
#else
       do
       :: source < RANKS ->
          do
          :: n < TILES -> run tile(source, me, n); n++
          :: else -> break
          od;
          n = 0;
          source++
       :: else -> break
       od;
       source = 0;
#endif
       me++
    :: else -> break
    od
  }
}
