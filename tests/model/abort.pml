// SPDX-License-Identifier: Apache-2.0
/* Failures: who is told, of which call, and that everyone leaves.
 *
 * What is modelled, and where it is in the code:
 *
 *   rank     calls one behind the other; a call ends when all peers have done their part of it, or
 *            is left when the abort word says so         os.hpp call_over, watchdog.hpp aborted
 *   actor    may fail in any call at any time: wrong     watchdog.hpp raise_everywhere, raise_at,
 *            input, or a deadline that a peer has missed   raise_word; a rank has ACTORS of them
 *   sender   puts this rank's failure to remote peers,   watchdog.hpp put_own_failure,
 *            and raises here what remote peers have put    take_in_failures; sender.hpp leave
 *   host     may do the same as the sender's leave       forward.cpp TwinRank::abort
 *   death    a rank may stop between any two steps, in the middle of telling others, too
 *
 * What a rank owes its peers in a call (counts, rows, results: exchange.pml) is one step here,
 * `serve`, which all may see at once: that it is seen later is the same as if it were done later.
 * A record is a plain store, visible to a reader once its writer has released: by the
 * compare-exchange that raises the word, or, where it is put, by the order of puts.
 *
 * A rank may fail only while others have not failed FAILURES times, so that without deaths it is
 * not their own deadlines that make ranks leave, but what they are told. With a death, every rank
 * has a deadline of its own (FAILURES=RANKS), and nothing else is sure to happen.
 *
 * What is left out: the inquiry that finds out what is missing, a host's copy of the record, reset.
 */

#ifndef RANKS
#define RANKS 3
#endif
#ifndef EPOCHS
#define EPOCHS 2
#endif
#ifndef FAILURES
#define FAILURES 1 /* in all */
#endif
#ifndef DEATHS
#define DEATHS 0 /* in all */
#endif
#ifndef ACTORS
#define ACTORS 1 /* of a rank, that may fail */
#endif
#ifndef NODE_RANKS
#define NODE_RANKS RANKS /* ranks of a node, among which peers are direct */
#endif

#define IS_DIRECT(one, other) ((one) / NODE_RANKS == (other) / NODE_RANKS)
#define AT(holder, writer) ((holder) * RANKS + (writer))

/* epoch << 32 | rank + 1 in the code */
#define WORD(call, writer) ((call) * 4 + (writer) + 1)
#define EPOCH_OF(word) ((word) / 4)
#define RANK_OF(word) ((word) % 4 - 1)

/* --- the heaps ------------------------------------------------------------------------------- */

byte abort_word[RANKS];
byte put_word[RANKS * RANKS]; /* [holder][writer]: Layout::put_failure */
byte record[RANKS * RANKS];   /* [holder][writer]: 0, or: */
#define WRITTEN 1
#define VISIBLE 2

/* --- what a rank knows by itself ------------------------------------------------------------- */

byte epoch[RANKS] = 1;
bool claimed[RANKS];     /* an actor of this rank writes its failure */
bool put_claimed[RANKS]; /* somebody puts it to remote peers */
byte failing[RANKS];     /* actors that have not left, because they tell of a failure */

/* --- for the model alone --------------------------------------------------------------------- */

byte served[RANKS]; /* the last call whose part this rank has done */
bool dead[RANKS];
byte failures = 0;
byte deaths = 0;
byte earliest = 0; /* call that has failed, of all failures; 0: none */
byte out = 0;      /* ranks that have left a call, have ended all, or are dead */

#ifdef MUTATION_ABORT_WITHOUT_EPOCH
#define IS_ABORTED(me) (abort_word[me] != 0)
#else
#define IS_ABORTED(me) (abort_word[me] != 0 && EPOCH_OF(abort_word[me]) <= epoch[me])
#endif

#if RANKS == 2
#define ALL_HAVE_SERVED(call) (served[0] >= call && served[1] >= call)
#else
#define ALL_HAVE_SERVED(call) (served[0] >= call && served[1] >= call && served[2] >= call)
#endif

/* Processes are numbered in the order in which they are declared, RANKS or a multiple of a kind. */
#define me (_pid % RANKS)

/* --- raising ---------------------------------------------------------------------------------- */

#if defined(MUTATION_LATER_FAILURE_REPLACES)
#define MAY_REPLACE(seen, word) (seen != word)
#elif defined(MUTATION_FIRST_FAILURE_STAYS)
#define MAY_REPLACE(seen, word) (seen == 0)
#else
#define MAY_REPLACE(seen, word) (seen == 0 || EPOCH_OF(seen) > EPOCH_OF(word))
#endif

#ifdef MUTATION_RAISED_BY_STORE
#define IS_UNCHANGED(holder, seen) true
#else
#define IS_UNCHANGED(holder, seen) (abort_word[holder] == seen)
#endif

/* The compare-exchange releases what its own rank has written. */
#ifdef MUTATION_RAISE_RELAXED
#define IS_RELEASED(holder, writer) false
#else
#define IS_RELEASED(holder, writer) (writer == me && record[AT(holder, writer)] == WRITTEN)
#endif

/* Behind the load of the abort word into `seen`, which comes in one step with what is before it: if
 * the word changes in between, the compare-exchange notices. */
inline raise_word(holder, writer, word) {
  do
  :: atomic {
    MAY_REPLACE(seen, word) ->
    if
    :: IS_UNCHANGED(holder, seen) ->
      if
      :: IS_RELEASED(holder, writer) -> record[AT(holder, writer)] = VISIBLE
      :: else
      fi;
      abort_word[holder] = word;
      seen = 0;
      break
    :: else -> seen = abort_word[holder]
    fi
  }
  :: atomic { !MAY_REPLACE(seen, word) -> seen = 0; break }
  od
}

inline write_record(holder, writer) {
  assert(record[AT(holder, writer)] == 0); /* once: a peer may be reading it */
  record[AT(holder, writer)] = WRITTEN
}

inline raise_at(holder) {
#ifdef MUTATION_WORD_BEFORE_RECORD
  seen = abort_word[holder];
  raise_word(holder, me, WORD(call, me));
  write_record(holder, me);
#else
  atomic {
    write_record(holder, me);
    seen = abort_word[holder]
  }
  raise_word(holder, me, WORD(call, me));
#endif
}

/* The peer that is told after another one; at last, and of nobody, the rank itself. */
#ifdef MUTATION_TOLD_TO_NO_PEER
#define NEXT_TOLD(peer) me
#else
#define NEXT_TOLD(peer) (peer / NODE_RANKS * NODE_RANKS + (peer % NODE_RANKS + 1) % NODE_SIZE(peer))
#define NODE_SIZE(peer) \
  (peer / NODE_RANKS * NODE_RANKS + NODE_RANKS > RANKS -> RANKS % NODE_RANKS : NODE_RANKS)
#endif

/* Among three, the one that dies does so without a word of its own, which is what keeps them few
 * enough; it dies in the midst of telling where there are two. */
#define MAY_FAIL(me) (DEATHS == 0 || RANKS == 2 || me < RANKS - 1)

inline note_earliest(call) {
  if
  :: earliest == 0 || call < earliest -> earliest = call
  :: else
  fi
}

/* --- the actors ------------------------------------------------------------------------------- */

active[RANKS] proctype rank() {
  {
    do
    :: atomic { epoch[me] <= EPOCHS && served[me] < epoch[me] -> served[me] = epoch[me] }
    :: atomic {
      epoch[me] <= EPOCHS && ALL_HAVE_SERVED(epoch[me]) && failing[me] == 0 ->
      epoch[me]++
    }
    :: atomic {
      epoch[me] <= EPOCHS && IS_ABORTED(me) ->
      /* Nobody leaves a call that is earlier than the one that has failed, and first_failure finds
       * a whole record. */
      assert(EPOCH_OF(abort_word[me]) <= epoch[me]);
      assert(record[AT(me, RANK_OF(abort_word[me]))] == VISIBLE);
      out++;
      break
    }
    :: atomic { epoch[me] > EPOCHS -> out++; break }
    :: atomic { me == RANKS - 1 && deaths < DEATHS -> deaths++; dead[me] = true }
    od
  } unless {
    atomic { dead[me] -> out++ }
  }
}

active[RANKS * ACTORS] proctype actor() {
  byte call = 0;
  byte seen = 0;
  byte peer = 0;
end: {
#ifndef MUTATION_NO_DEADLINE
    atomic {
      epoch[me] <= EPOCHS && failures < FAILURES && MAY_FAIL(me) && !IS_ABORTED(me) ->
      failures++;
      failing[me]++;
      call = epoch[me]
    }
    if
#ifdef MUTATION_NOT_CLAIMED
    :: atomic { true -> note_earliest(call) }
#else
    :: atomic { !claimed[me] -> claimed[me] = true; note_earliest(call) }
#endif
      raise_at(me);
      peer = NEXT_TOLD(me);
      do
      :: peer != me -> raise_at(peer); peer = NEXT_TOLD(peer)
      :: else -> break
      od
    :: atomic { claimed[me]  -> skip }
    fi;
    atomic { failing[me]--; call = 0; peer = 0 }
#else
    false
#endif
  } unless {
    dead[me]
  }
}

#if NODE_RANKS < RANKS

/* The word is the one that was found to be this rank's own: a second look may see another's. To one
 * remote peer, of two at most. */
inline put_to(peer) {
  if
  :: !IS_DIRECT(me, peer) ->
    atomic { write_record(peer, me) }
#ifndef MUTATION_PUTS_UNORDERED
    record[AT(peer, me)] = VISIBLE;
#endif
    put_word[AT(peer, me)] = word
  :: else
  fi
}

inline put_own_failure() {
  if
#ifdef MUTATION_PUT_NOT_CLAIMED
  :: true ->
#else
  :: atomic { !put_claimed[me] -> put_claimed[me] = true }
#endif
    put_to((me + 1) % RANKS);
    put_to((me + 2) % RANKS)
  :: put_claimed[me]
  fi
}

#ifdef MUTATION_PUT_BY_NOBODY
#define IS_OWN(word) false
#else
#define IS_OWN(word) ((word) != 0 && RANK_OF(word) == me)
#endif

/* A failure that has been put is raised once here; in the code again and again, to no effect. */
#define TAKE_IN(peer, is_taken) \
  :: atomic { \
    put_word[AT(me, peer)] != 0 && !is_taken -> \
    is_taken = true; \
    seen = abort_word[me] \
  }; \
    raise_word(me, peer, put_word[AT(me, peer)])
active[RANKS] proctype sender() {
  byte word = 0;
  byte seen = 0;
  bool is_taken_of_next = false;
  bool is_taken_of_last = false;
  bool has_put = false;
  {
    skip;
  end:
    do
    TAKE_IN((me + 1) % RANKS, is_taken_of_next)
    TAKE_IN((me + 2) % RANKS, is_taken_of_last)
    :: atomic {
      IS_OWN(abort_word[me]) && IS_ABORTED(me) && !has_put ->
      has_put = true;
      word = abort_word[me]
    };
      put_own_failure()
    od
  } unless {
    dead[me]
  }
}

#ifdef WITH_HOST
active[RANKS] proctype host() {
  byte word = 0;
  {
    skip;
  end:
    atomic { IS_OWN(abort_word[me]) -> word = abort_word[me] }
    put_own_failure()
  } unless {
    dead[me]
  }
}
#endif

#endif

#undef me

#ifdef TOLD

ltl told { [] (failures > 0 -> <> (out == RANKS)) }

#else

/* When nothing moves any more. */
active proctype judge() {
  byte one;
  timeout ->
  assert(out == RANKS); /* everyone has left, or has ended all calls */
  for (one : 0 .. RANKS - 1) {
    /* Everyone has been told of the earliest call that has failed. */
    assert(deaths > 0 || EPOCH_OF(abort_word[one]) == earliest)
  }
}

#endif
