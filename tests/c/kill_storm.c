/* Five processes talk to each other over everything that the device has. Again and again one of them
 * is killed at a random instant, or at a random instruction, or stopped for a while. The others get
 * error completions for what they had under way to it, and for nothing else; every byte that arrives is
 * the right one; nobody hangs; what the dead one left is swept up by who takes its place.
 * ROCECOMM_TEST_ROUNDS sets the number of rounds, ROCECOMM_TEST_SEED repeats a run's choices. */
#include <dirent.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/stat.h>

#include "storm.h"

static struct board *board;
static pid_t pid[N];
static uint32_t seed, rng, born[N]; /* incarnations */

static uint32_t roll(uint32_t n)
{
	rng ^= rng << 13;
	rng ^= rng >> 17;
	rng ^= rng << 5;
	return rng % n;
}

static void failed(const char *what, int round)
{
	fprintf(stderr, "round %d: %s; ROCECOMM_TEST_SEED=%u\n", round, what, seed);
	for (int i = 0; i < N; i++) {
		fprintf(stderr, "  rank %d.%u:", i, atomic_load(&board->now[i]));
		for (int k = 0; k < N; k++)
			fprintf(stderr, " %lu/%u", (unsigned long)atomic_load(&board->done[i][k]), atomic_load(&board->broken[i][k]));
		fputc('\n', stderr);
	}
	if (getenv("ROCECOMM_TEST_HOLD"))
		pause();
	for (int i = 0; i < N; i++)
		if (pid[i] > 0)
			kill(pid[i], SIGKILL);
	exit(1);
}

static void look_after(int round) /* nobody ends by itself */
{
	int status;
	for (int i = 0; i < N; i++)
		if (pid[i] > 0 && waitpid(pid[i], &status, WNOHANG) == pid[i]) {
			pid[i] = 0;
			fprintf(stderr, "rank %d ended: %s %d\n", i, WIFSIGNALED(status) ? "signal" : "status",
				WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
			failed("a rank ended that should not", round);
		}
}

static void spawn(int rank, uint32_t inc)
{
	uint32_t salt = roll(1u << 30);
	fflush(NULL);
	born[rank] = inc;
	for (int k = 0; k < N; k++) {
		atomic_store(&board->met[rank][k], 0);
		atomic_store(&board->broken[rank][k], 0);
	}
	CHECK((pid[rank] = fork()) >= 0);
	if (pid[rank] == 0) {
		static struct worker w;
		w.b = board;
		w.me = (uint32_t)rank;
		w.inc = inc;
		w.rng = salt | 1;
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		work(&w);
	}
}

/* Every two that live complete something new. */
static void progress(int round, int except, uint64_t want)
{
	uint64_t before[N][N];
	double until = seconds() + 12;
	for (int i = 0; i < N; i++)
		for (int k = 0; k < N; k++)
			before[i][k] = atomic_load(&board->done[i][k]);
	for (int i = 0; i < N; i++)
		for (int k = 0; k < N; k++)
			while (i != k && i != except && k != except && atomic_load(&board->done[i][k]) < before[i][k] + want) {
				look_after(round);
				if (seconds() > until) {
					fprintf(stderr, "between %d and %d\n", i, k);
					failed("no progress", round);
				}
				usleep(200);
			}
}

static void step_and_kill(int rank, int round)
{
	int status;
	if (ptrace(PTRACE_SEIZE, pid[rank], 0, 0) || ptrace(PTRACE_INTERRUPT, pid[rank], 0, 0)) {
		CHECK(kill(pid[rank], SIGKILL) == 0); /* not allowed here: killed all the same */
		return;
	}
	CHECK(waitpid(pid[rank], &status, __WALL) == pid[rank]);
	for (uint32_t n = roll(4000); n-- > 0 && WIFSTOPPED(status);) {
		if (ptrace(PTRACE_SINGLESTEP, pid[rank], 0, 0))
			break;
		CHECK(waitpid(pid[rank], &status, __WALL) == pid[rank]);
	}
	if (!WIFSTOPPED(status))
		failed("a rank ended that should not", round);
	CHECK(kill(pid[rank], SIGKILL) == 0);
}

static void murder(int rank, int how, int round)
{
	int status;
	if (how == 2) {
		CHECK(kill(pid[rank], SIGSTOP) == 0);
		usleep(roll(30000));
		CHECK(kill(pid[rank], SIGKILL) == 0);
	} else if (how < 6) {
		step_and_kill(rank, round);
	} else {
		CHECK(kill(pid[rank], SIGKILL) == 0);
	}
	do
		CHECK(waitpid(pid[rank], &status, __WALL) == pid[rank]);
	while (!WIFSIGNALED(status) && !WIFEXITED(status));
	if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
		failed("a rank ended that should not", round);
	pid[rank] = 0;
	atomic_store(&board->now[rank], 0);
}

static void notice(int rank, int round)
{
	double until = seconds() + 9; /* the transport's own timeout */
	for (int i = 0; i < N; i++)
		while (pid[i] && atomic_load(&board->met[i][rank]) == born[rank] &&
		       atomic_load(&board->broken[i][rank]) != born[rank]) {
			look_after(round);
			if (seconds() > until) {
				fprintf(stderr, "rank %d does not notice that %d.%u is gone\n", i, rank, born[rank]);
				failed("no error completion", round);
			}
			usleep(200);
		}
}

static void one_round(int round)
{
	int rank = (int)roll(N), how = (int)roll(10), second = roll(5) ? -1 : (int)roll(N);
	if (roll(5))
		progress(round, -1, 3); /* else: as they are, connecting perhaps, or opening the device */
	if (how < 2) { /* stopped for a while: nobody sees an error */
		usleep(roll(3000));
		CHECK(kill(pid[rank], SIGSTOP) == 0);
		usleep(roll(150000));
		CHECK(kill(pid[rank], SIGCONT) == 0);
		return;
	}
	if (second == rank)
		second = -1;
	atomic_store(&board->doomed[rank], born[rank]);
	if (second >= 0)
		atomic_store(&board->doomed[second], born[second]);
	usleep(roll(3000));
	murder(rank, how, round);
	if (second >= 0)
		murder(second, 9, round);
	notice(rank, round);
	if (second >= 0)
		notice(second, round);
	else if (roll(2))
		progress(round, rank, 3);
	spawn(rank, born[rank] + 1);
	if (second >= 0)
		spawn(second, born[second] + 1);
}

static int count_segments(const char *dir)
{
	char path[300];
	int n = 0;
	snprintf(path, sizeof(path), "%s/rocecomm-%u", dir, (unsigned)geteuid());
	DIR *d = opendir(path);
	for (struct dirent *e; d && (e = readdir(d));)
		n += strncmp(e->d_name, "seg-", 4) == 0;
	if (d)
		closedir(d);
	return n;
}

int main(void)
{
	const char *rounds = getenv("ROCECOMM_TEST_ROUNDS"), *s = getenv("ROCECOMM_TEST_SEED");
	const char *base = getenv("ROCECOMM_SOFT_DIR");
	char dir[100];
	int status;
#ifdef __SANITIZE_THREAD__
	puts("the thread sanitizer does not see what orders processes");
	return 77;
#endif
	snprintf(dir, sizeof(dir), "%.60s/rocecomm-storm-XXXXXX", base && *base ? base : "/dev/shm");
	CHECK(mkdtemp(dir));
	setenv("ROCECOMM_SOFT_DIR", dir, 1);
	seed = s ? (uint32_t)strtoul(s, NULL, 0) : (uint32_t)time(NULL) * 2654435761u ^ (uint32_t)getpid();
	rng = seed | 1;
	printf("seed %u\n", seed);
	board = mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(board != MAP_FAILED);
	for (int i = 0; i < N; i++)
		spawn(i, 1);
	for (int round = 0; round < (rounds ? atoi(rounds) : 12); round++)
		one_round(round);
	progress(-1, -1, 3);
	CHECK(count_segments(dir) == N); /* what the dead left is gone */
	for (int i = 0; i < N; i++)
		atomic_store(&board->doomed[i], atomic_load(&board->now[i]));
	atomic_store(&board->quit, 1);
	for (int i = 0; i < N; i++)
		CHECK(waitpid(pid[i], &status, 0) == pid[i] && status == 0);
	struct ibv_context *c = open_device();
	CHECK(c && ibv_close_device(c) == 0);
	CHECK(rmdir(dir) == 0);
	return 0;
}
