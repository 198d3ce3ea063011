// SPDX-License-Identifier: Apache-2.0
/* Places between the two GEMMs that tiles of a call use in turn, as those of a ring. Is nothing
 * overwritten that somebody must still read, and does everybody get on?
 *
 * What is modelled, and where it is in the code:
 *
 *   subscriber     makes the next tile when there are places   tile_plan.hpp plan
 *                  for its rows; sees which tiles, in their    tile_plan.hpp find_free_places
 *                  order, have been multiplied
 *   scheduler      publishes parts of either GEMM, in any      scheduler.hpp publish_up_to
 *                  order and as early as it can
 *   claim          a ticket, then the wait for its slot        processor.hpp claim
 *   product0          a part of a tile's first GEMM; the last     processor.hpp complete,
 *                  posts the second one                        mailbox.hpp post_next
 *   product1          a part of its second; the last says that    processor.hpp complete
 *                  the tile is multiplied
 *
 * A call of one rank, whose rows are all here. Each tile has 1 to ROWS_MOST rows, and an expert may
 * have all of them: which one it is decides nothing here. What is left out: memory order
 * (tests/native/test_ordered.py), and all that goes on between ranks (exchange.pml).
 */

#ifndef PROCESSORS
#define PROCESSORS 2
#endif
#ifndef TILES
#define TILES 3 /* or 4 */
#endif
#ifndef PLACES
#define PLACES 2 /* of rows, in a ring; a tile that begins at its end ends behind it */
#endif
#ifndef ROWS_MOST
#define ROWS_MOST 2
#endif
#ifndef PARTS
#define PARTS 2 /* of each GEMM */
#endif

#define SLOTS (2 * PARTS * TILES)
#define NONE 255

byte rows[TILES];
byte first_row[TILES]; /* of all tiles' rows */
byte made = 0;         /* tiles */
byte free_to = PLACES; /* up to which row of all tiles' there are places */
byte seen = 0;         /* tiles, in their order, that have been seen to be multiplied */
bool multiplied[TILES];

byte published = 0;
byte claimed = 0;
byte ring[SLOTS]; /* 2 * tile + which GEMM */
byte ring_part[SLOTS];
byte given[2 * TILES]; /* parts of either GEMM that are published */
byte done0[TILES];
byte done1[TILES];
bool posted1[TILES];

byte reader[PLACES + ROWS_MOST]; /* which tile's second GEMM must still read a place */
byte inner[(PLACES + ROWS_MOST) * PARTS];

#define PLACE(tile) (first_row[tile] % PLACES)

#if defined(MUTATION_PROCESSORS_AWAIT_PLACES)
#define AWAIT_PLACES(tile) first_row[tile] + rows[tile] <= free_to
#else
#define AWAIT_PLACES(tile) skip
#endif
#if defined(MUTATION_PLACES_NOT_AWAITED) || defined(MUTATION_PROCESSORS_AWAIT_PLACES)
#define MAY_MAKE true
#else
#define MAY_MAKE (next_row + next_rows <= free_to)
#endif
#if defined(MUTATION_ONE_PART_READ)
#define ALL_READ(tile) (done1[tile] == 1)
#else
#define ALL_READ(tile) (done1[tile] == PARTS)
#endif
#if defined(MUTATION_ANY_TILE_FREES_PLACES)
#define IS_FREE(tile) (multiplied[0] + multiplied[1] + multiplied[2] > tile)
#else
#define IS_FREE(tile) (multiplied[tile])
#endif

proctype subscriber() {
  byte next_row = 0;
  byte next_rows = 1;
  select(next_rows : 1 .. ROWS_MOST);
  do
  :: made < TILES && MAY_MAKE ->
     d_step {
       rows[made] = next_rows;
       first_row[made] = next_row;
       next_row = next_row + next_rows;
       next_rows = 1
     }
     made++;
     select(next_rows : 1 .. ROWS_MOST)
#if !defined(MUTATION_PLACES_STAY_TAKEN)
  :: seen < made && IS_FREE(seen) -> d_step { free_to = free_to + rows[seen]; seen++ }
#endif
  :: made == TILES && seen == TILES -> break
  od
}

#define TO_GIVE0(tile) ((tile) < made && given[2 * (tile)] < PARTS)
#define TO_GIVE1(tile) (posted1[tile] && given[2 * (tile) + 1] < PARTS)

inline publish(tile, gemm) {
  d_step {
    ring[published] = 2 * (tile) + gemm;
    ring_part[published] = given[2 * (tile) + gemm];
    given[2 * (tile) + gemm]++;
    published++
  }
}

proctype scheduler() {
  do
  :: published == SLOTS -> break
  :: TO_GIVE0(0) -> publish(0, 0)
  :: TO_GIVE1(0) -> publish(0, 1)
  :: TO_GIVE0(1) -> publish(1, 0)
  :: TO_GIVE1(1) -> publish(1, 1)
  :: TO_GIVE0(2) -> publish(2, 0)
  :: TO_GIVE1(2) -> publish(2, 1)
#if TILES > 3
  :: TO_GIVE0(3) -> publish(3, 0)
  :: TO_GIVE1(3) -> publish(3, 1)
#endif
  od
}

inline product0(tile, part, i) {
  AWAIT_PLACES(tile);
  d_step {
    i = PLACE(tile);
    do
    :: i < PLACE(tile) + rows[tile] ->
       assert(reader[i] == NONE || reader[i] == tile);
       reader[i] = tile;
       inner[i * PARTS + part] = tile;
       i++
    :: else -> break
    od;
    i = 0
  }
  d_step { /* an atomic: one part is the last */
    done0[tile]++;
    i = done0[tile]
  }
  if
  :: i == PARTS -> posted1[tile] = true
  :: else
  fi;
  i = 0
}

inline product1(tile, part, i) {
  d_step {
    i = PLACE(tile) * PARTS;
    do
    :: i < (PLACE(tile) + rows[tile]) * PARTS -> assert(inner[i] == tile); i++
    :: else -> break
    od;
    i = 0
  }
  d_step {
    done1[tile]++;
    i = (ALL_READ(tile) -> 1 : 0);
    if
    :: done1[tile] == PARTS ->
       part = PLACE(tile);
       do
       :: part < PLACE(tile) + rows[tile] -> reader[part] = NONE; part++
       :: else -> break
       od;
       part = 0
    :: else
    fi
  }
  if
  :: i == 1 -> multiplied[tile] = true
  :: else
  fi;
  i = 0
}

proctype processor() {
  byte ticket = 0;
  byte tile = 0;
  byte part = 0;
  byte i = 0;
  do
  :: claimed == SLOTS -> break
  :: d_step { claimed < SLOTS -> ticket = claimed; claimed++ }
     ticket < published;
     d_step {
       tile = ring[ticket] / 2;
       part = ring_part[ticket]
     }
     if
     :: ring[ticket] % 2 == 0 -> product0(tile, part, i)
     :: else -> product1(tile, part, i)
     fi;
     d_step {
       tile = 0;
       part = 0;
       ticket = 0
     }
  od
}

init {
  byte n = 0;
  atomic {
    do
    :: n < PLACES + ROWS_MOST -> reader[n] = NONE; n++
    :: else -> break
    od;
    n = 0;
    run subscriber();
    run scheduler();
    do
    :: n < PROCESSORS -> run processor(); n++
    :: else -> break
    od
  }
}
