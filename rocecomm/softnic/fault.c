/* Faults on request: the table of rules of this process, and the functions that fill it.
 *
 * Each request is put to the rules once, when it first comes to the head of its queue; what was
 * decided stays with it (struct sn_hold). One counter and one pseudo-random stream per rule: the same
 * seed and the same order of requests give the same faults. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "fault.h"

/* How many contexts of the fabric have anything injected: a word that all its processes see, so
 * that one branch keeps the data path clear of everything here. */
_Atomic uint32_t sn_no_faults;
_Atomic uint32_t *sn_faults = &sn_no_faults;

static _Atomic uint32_t table_lock;
static struct sn_fault_rule table[SN_FAULT_RULES];
static uint64_t last_id;
static uint64_t environment_id; /* of the rules that ROCECOMM_SOFT_FAULT brought */
static char *environment_text;

void sn_faults_forked(void) /* the child begins with what its environment says */
{
	sn_faults = &sn_no_faults; /* the fabric is not there until the child opens a device */
	memset(table, 0, sizeof(table));
	atomic_store(&table_lock, 0);
	environment_id = 0;
}

/* ---- deciding ------------------------------------------------------------------------------ */

/* Number `n` of the stream `seed`, in [0, 1): splitmix64 (Steele, Lea, Flood 2014). */
static double draw(uint64_t seed, uint64_t n)
{
	uint64_t z = seed + n * 0x9e3779b97f4a7c15ULL;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ULL;
	z = (z ^ z >> 27) * 0x94d049bb133111ebULL;
	return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

static bool concerns(const struct sn_fault_rule *r, struct sn_ctx *ctx)
{
	return r->id && (!r->context || r->context == ctx->id) &&
	       (r->device < 0 || (unsigned)r->device == sn_device_index(&ctx->vctx.context));
}

bool sn_fault_decide(struct sn_ctx *ctx, uint32_t qpn, uint32_t op, struct sn_fault_rule *hit)
{
	bool found = false;
	sn_spin(&table_lock);
	for (unsigned i = 0; i < SN_FAULT_RULES; i++) {
		struct sn_fault_rule *r = &table[i];
		if (!concerns(r, ctx) || !(r->ops & op) || (r->qpn && r->qpn != qpn))
			continue;
		uint64_t n = r->seen++;
		if (found || n < r->after || (r->times && r->fired >= r->times) || draw(r->seed, n) >= r->p)
			continue;
		r->fired++;
		*hit = *r;
		found = true;
	}
	sn_unspin(&table_lock);
	return found;
}

/* The errno with which a control verb fails, or 0. */
int sn_fault_verb(struct sn_ctx *ctx, enum sn_verb verb)
{
	int err = 0;
	sn_spin(&table_lock);
	for (unsigned i = 0; i < SN_FAULT_RULES; i++) {
		struct sn_fault_rule *r = &table[i];
		if (!concerns(r, ctx) || !(r->verbs & 1u << verb))
			continue;
		uint64_t n = r->seen++;
		if (err || n < r->after || (r->times && r->fired >= r->times) || draw(r->seed, n) >= r->p)
			continue;
		r->fired++;
		err = r->err;
	}
	sn_unspin(&table_lock);
	return err;
}

/* Is the injection still there? What waits because of it goes on when it is removed. */
bool sn_fault_still(uint64_t id)
{
	bool found = false;
	sn_spin(&table_lock);
	for (unsigned i = 0; i < SN_FAULT_RULES && !found; i++)
		found = table[i].id == id;
	sn_unspin(&table_lock);
	return found;
}

/* ---- who must look -------------------------------------------------------------------------- */

static void mark(struct sn_ctx *ctx, uint32_t set, uint32_t clear) /* with the table's lock held */
{
	if (!ctx->seg)
		return;
	uint32_t was = atomic_load(&ctx->seg->faults), now = (was & ~clear) | set;
	if (!was && now)
		atomic_fetch_add(sn_faults, 1);
	atomic_store(&ctx->seg->faults, now);
	if (was && !now)
		atomic_fetch_sub(sn_faults, 1);
}

void sn_fault_mark(struct sn_ctx *ctx, uint32_t set, uint32_t clear)
{
	sn_spin(&table_lock);
	mark(ctx, set, clear);
	sn_unspin(&table_lock);
}

static void look(struct sn_ctx *ctx, void *arg)
{
	bool any = false;
	(void)arg;
	sn_spin(&table_lock);
	for (unsigned i = 0; i < SN_FAULT_RULES; i++)
		any |= concerns(&table[i], ctx);
	mark(ctx, any ? SN_FAULTS_RULES : 0, any ? 0 : SN_FAULTS_RULES);
	sn_unspin(&table_lock);
}

static void wake(struct sn_ctx *ctx, void *arg)
{
	(void)arg;
	sn_fault_wake(ctx->seg);
}

/* ---- adding and removing -------------------------------------------------------------------- */

static bool erase(uint64_t id) /* with the lock held */
{
	bool found = false;
	for (unsigned i = 0; i < SN_FAULT_RULES; i++)
		if (id && table[i].id == id) {
			table[i].id = 0;
			found = true;
		}
	return found;
}

static int add(const char *origin, const char *text, sn_id context, uint64_t *id)
{
	struct sn_fault_rule rules[SN_FAULT_RULES];
	unsigned n, put = 0, room = 0;
	int err = sn_fault_parse(origin, text, rules, SN_FAULT_RULES, &n);
	if (err)
		return err;
	sn_spin(&table_lock);
	for (unsigned i = 0; i < SN_FAULT_RULES; i++)
		room += table[i].id == 0;
	if (room >= n) {
		*id = ++last_id;
		for (unsigned i = 0; i < SN_FAULT_RULES && put < n; i++)
			if (!table[i].id) {
				table[i] = rules[put++];
				table[i].context = context;
				table[i].id = *id;
			}
	}
	sn_unspin(&table_lock);
	if (room < n)
		return sn_because(ENOSPC, "%s: %u fault rules of %u are taken already; remove some", origin,
				  SN_FAULT_RULES - room, SN_FAULT_RULES);
	return 0;
}

SN_EXPORT int softnic_inject(struct ibv_context *context, const char *rules, uint64_t *id)
{
	struct sn_ctx *ctx = context ? sn_ctx_of(context) : NULL;
	if (ctx && sn_foreign(ctx))
		return EPERM;
	int err = add("softnic_inject", rules, ctx ? ctx->id : 0, id);
	if (!err)
		sn_each_context(look, NULL);
	return err;
}

SN_EXPORT int softnic_inject_remove(uint64_t id)
{
	sn_spin(&table_lock);
	bool found = erase(id);
	sn_unspin(&table_lock);
	if (!found)
		return ENOENT;
	sn_each_context(look, NULL);
	sn_each_context(wake, NULL); /* what waited may go on */
	return 0;
}

SN_EXPORT int softnic_inject_stats(uint64_t id, uint64_t *matched, uint64_t *hit)
{
	bool found = false;
	*matched = *hit = 0;
	sn_spin(&table_lock);
	for (unsigned i = 0; i < SN_FAULT_RULES; i++)
		if (id && table[i].id == id) {
			*matched += table[i].seen;
			*hit += table[i].fired;
			found = true;
		}
	sn_unspin(&table_lock);
	return found ? 0 : ENOENT;
}

/* ---- contexts that come and go --------------------------------------------------------------- */

/* Before anything is opened: can the environment be used? */
int sn_fault_check_environment(void)
{
	const char *text = secure_getenv("ROCECOMM_SOFT_FAULT");
	struct sn_fault_rule rules[SN_FAULT_RULES];
	unsigned n;
	int err = text && *text ? sn_fault_parse("ROCECOMM_SOFT_FAULT", text, rules, SN_FAULT_RULES, &n) : 0;
	if (err == EINVAL)
		sn_tell(err); /* the user's, not the program's, mistake */
	return err;
}

static void count(struct sn_ctx *ctx, void *arg)
{
	(void)ctx;
	++*(unsigned *)arg;
}

/* The rules of the environment are put in when the first context of the process opens, with fresh
 * counters, and when it has changed. */
static int follow_environment(unsigned contexts)
{
	const char *text = secure_getenv("ROCECOMM_SOFT_FAULT");
	text = text && *text ? text : NULL;
	if (environment_id && contexts > 1 && text && environment_text && !strcmp(text, environment_text))
		return 0;
	sn_spin(&table_lock);
	erase(environment_id);
	sn_unspin(&table_lock);
	environment_id = 0;
	free(environment_text);
	environment_text = text ? strdup(text) : NULL;
	return text ? add("ROCECOMM_SOFT_FAULT", text, 0, &environment_id) : 0;
}

int sn_fault_opened(struct sn_ctx *ctx)
{
	static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
	unsigned contexts = 0;
	(void)ctx;
	sn_each_context(count, &contexts);
	pthread_mutex_lock(&one);
	int err = follow_environment(contexts);
	pthread_mutex_unlock(&one);
	sn_each_context(look, NULL);
	return err;
}

void sn_fault_closed(struct sn_ctx *ctx)
{
	sn_spin(&table_lock);
	for (unsigned i = 0; i < SN_FAULT_RULES; i++)
		if (table[i].id && table[i].context == ctx->id)
			table[i].id = 0;
	mark(ctx, 0, UINT32_MAX);
	sn_unspin(&table_lock);
}
