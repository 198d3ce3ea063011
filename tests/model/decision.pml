// SPDX-License-Identifier: Apache-2.0
/* Who finds the parts of a call of few rows: processors, by the counts, or the subscriber, which
 * tells them in the ready ring. Is every part run once, and does everybody get on?
 *
 * What is modelled, and where it is in the code:
 *
 *   come           a source's count is there                   packet.hpp send_count
 *   know           the OS block has decoded it                  counts_subscriber.hpp finish
 *   decide         the exchange of the word, by who has seen     processor.hpp find_few
 *                  all counts, or by the subscriber, whose       arrivals_subscriber.hpp
 *                  patience may end at any time                  may_make_tiles
 *   reserve        slots for parts that nobody tells             arrivals_subscriber.hpp reserve_slots
 *   tell           words of a tile's parts                       arrivals_subscriber.hpp hand_out
 *   claim          a ticket, then the wait for its slot, or for  processor.hpp find
 *                  the counts
 *   combine        a word behind all of them                     returns_subscriber.hpp learn_rows
 *
 * A call of one rank. Each source sends rows of one expert. By the counts they are one tile, whose
 * part n is the n-th. Tiles that the subscriber makes without all counts have one source's rows. With
 * MANY, processors see by the counts that there is no such plan. What is left out: memory order,
 * since the word publishes nothing, and rows, for which parts of either plan wait.
 */

#ifndef PROCESSORS
#define PROCESSORS 2
#endif
#ifndef SOURCES
#define SOURCES 2
#endif
#ifndef PARTS
#define PARTS 2 /* of a tile */
#endif

#define SLOTS (SOURCES * PARTS + 1 + PROCESSORS) /* the last ones are never filled */
#define NOTHING 255
#define COMBINE 254
#define ALL SOURCES /* as a tile's source */

mtype = { nobody, processors, subscriber }; /* as FoundBy */
mtype found_by = nobody;

bool come[SOURCES];
bool known[SOURCES];
bool tiled[SOURCES];
bool ran[SOURCES * PARTS]; /* part of a source's rows */
bool combined = false;
bool planned = false; /* OsMemory::planned */
bool over = false;
byte published = 0;
byte claimed = 0;
byte ring[SLOTS]; /* part + PARTS * source, COMBINE or NOTHING */
byte done = 0;    /* processors that have left */

#define ALL_COME (come[0] && come[SOURCES - 1] && come[SOURCES / 2])
#define ALL_KNOWN (known[0] && known[SOURCES - 1] && known[SOURCES / 2])

#if defined(MUTATION_ONE_COUNT_DECIDES)
#define SEEN (come[0])
#else
#define SEEN ALL_COME
#endif

/* Part `part` of the rows of a source, or of all that have come. */
inline run_part(source, part, i) {
  d_step {
    i = 0;
    do
    :: i < SOURCES ->
       if
       :: (source == i) || (source == ALL && come[i]) ->
          assert(!ran[i * PARTS + part]);
          ran[i * PARTS + part] = true
       :: else
       fi;
       i++
    :: else -> break
    od;
    i = 0
  }
}

/* What compares and exchanges the word: one step. */
inline decide(mine, wins) {
  d_step {
    if
    :: found_by == nobody -> found_by = mine
    :: else
    fi;
    wins = (found_by == mine)
  }
}

proctype processor() {
  byte ticket = 0;
  byte i = 0;
  byte word = NOTHING;
  bool by_counts = false; /* the plan is made */
  bool told = false;      /* parts are told in the ring */
  do
  :: d_step { ticket = claimed; claimed++ }
     do
     :: !by_counts && ring[ticket] != NOTHING ->
        told = true;
        word = ring[ticket];
        break
     :: !by_counts && !told && SEEN ->
#if defined(MANY)
        told = true
#else
        decide(processors, by_counts);
#if defined(MUTATION_PROCESSORS_DO_NOT_ASK)
        by_counts = true;
#endif
        told = !by_counts
#endif
     :: by_counts && ticket < PARTS -> word = ALL * PARTS + ticket; break
     :: by_counts && ticket >= PARTS -> by_counts = false; told = true
     :: over -> goto leave
     od;
     if
     :: word == COMBINE ->
        d_step {
          i = 0;
          do
          :: i < SOURCES * PARTS -> assert(ran[i]); i++
          :: else -> break
          od;
          i = 0;
          assert(!combined);
          combined = true
        }
     :: else -> run_part(word / PARTS, word % PARTS, i)
     fi
  od;
leave:
  done++
}

inline tell(source, i) {
  i = 0;
  do
  :: i < PARTS ->
     d_step { ring[published] = source * PARTS + i; published++; i++ }
  :: else -> break
  od;
  i = 0
}

proctype arrivals() {
  byte i = 0;
  byte source = 0;
  bool makes = false;
  do
  :: ALL_KNOWN -> break
  :: !ALL_KNOWN && !makes -> /* patience ends */
#if defined(MUTATION_SUBSCRIBER_DOES_NOT_ASK)
     makes = true
#else
     decide(subscriber, makes)
#endif
  :: !ALL_KNOWN && makes && source < SOURCES && known[source] && !tiled[source] ->
     tell(source, i);
     tiled[source] = true;
     planned = true
  :: source + 1 < SOURCES -> source++
  od;
#if defined(MANY)
  if
  :: !makes -> decide(subscriber, makes); assert(makes)
  :: else
  fi;
#endif
  if
  :: makes ->
     source = 0;
     do
     :: source < SOURCES && !tiled[source] -> tell(source, i); source++
     :: source < SOURCES && tiled[source] -> source++
     :: else -> break
     od
  :: else ->
#if !defined(MUTATION_NO_SLOTS_ARE_RESERVED)
     assert(published == 0);
     published = published + PARTS
#endif
  fi;
  planned = true
}

/* A source sends its count, the OS block decodes it. */
proctype counts(byte source) {
  come[source] = true;
  known[source] = true
}

/* The Combine of the call's tokens: a slot behind those of the plan, and filled when results are
 * back. */
proctype returns() {
  byte slot = 0;
  byte i = 0;
#if !defined(MUTATION_SLOTS_ARE_TAKEN_BEFORE)
  planned;
#endif
  do
  :: i < SOURCES * PARTS -> ran[i]; i++
  :: else -> break
  od;
  i = 0;
  d_step { slot = published; published++ }
  ring[slot] = COMBINE;
  planned && combined && claimed == published + PROCESSORS;
  over = true
}

init {
  byte n = 0;
  atomic {
    do
    :: n < SLOTS -> ring[n] = NOTHING; n++
    :: else -> break
    od;
    n = 0;
    do
    :: n < SOURCES -> run counts(n); n++
    :: else -> break
    od;
    n = 0;
    do
    :: n < PROCESSORS -> run processor(); n++
    :: else -> break
    od;
    run arrivals();
    run returns()
  }
  done == PROCESSORS
}
