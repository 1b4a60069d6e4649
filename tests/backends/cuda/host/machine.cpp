// What runs a grid of fibers; see te_ops/machine.cuh.
//
// A fiber begins by setcontext and goes on by longjmp: swapcontext asks the kernel for the signal mask at every switch,
// and switches are what a run takes its time for.
#undef _FORTIFY_SOURCE  // its longjmp refuses to go to another stack
#include <te_ops/machine.cuh>
#include <setjmp.h>
#include <ucontext.h>
#include <vector>

namespace te {

Host host;

namespace {

constexpr size_t STACK = 65536;
constexpr u64 UNWRITTEN = 0x7fc00000ffffffffull;  // NaN, as two numbers or as one

struct Fiber {
  ucontext_t start;
  jmp_buf place;
  bool begun, done;
};
std::vector<Fiber> fibers;
jmp_buf scheduler;
void (*body)(const void*);
const void* argument;

void enter() {
  body(argument);
  fibers[host.current].done = true;
  yield();
}

void resume(int t) {
  Fiber& fiber = fibers[t];
  host.current = t;
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.start);
}

template <class T> T* filled(std::vector<T>& own, size_t count, T value) {
  own.assign(count, value);
  return own.data();
}

}  // namespace

void yield() {
  if (!_setjmp(fibers[host.current].place)) _longjmp(scheduler, 1);
}

void run_blocks(i64 grid, int threads, int shared, int cluster, void (*run)(const void*), const void* with) {
  static std::vector<char> stacks;
  static std::vector<Gate> gates, groups;
  static std::vector<std::vector<u64>> memory;
  static std::vector<u64*> memories;
  static std::vector<int> arrived, generations;
  static std::vector<u32> slots;
  const int count = threads * cluster;
  if (grid % cluster) __builtin_trap();
  body = run;
  argument = with;
  stacks.resize(STACK * count);
  fibers.resize(count);
  slots.resize(count);
  host.threads = threads;
  host.cluster = cluster;
  host.shared = shared;
  host.grid = grid;
  host.slots = slots.data();
  for (i64 b = 0; b < grid; b += cluster) {
    host.first = b;
    host.together = Gate();
    host.gates = filled(gates, cluster, Gate());
    host.groups = filled(groups, 16 * cluster, Gate());
    memory.assign(cluster, std::vector<u64>((shared + 7) / 8 + 2, UNWRITTEN));
    memories.clear();
    for (auto& own : memory) memories.push_back(own.data());
    host.memory = memories.data();
    host.warp_arrived = filled(arrived, count / 32, 0);
    host.warp_generation = filled(generations, count / 32, 0);
    for (int t = 0; t < count; ++t) {
      Fiber& fiber = fibers[t];
      fiber.begun = fiber.done = false;
      getcontext(&fiber.start);
      fiber.start.uc_stack.ss_sp = stacks.data() + STACK * t;
      fiber.start.uc_stack.ss_size = STACK;
      fiber.start.uc_link = nullptr;
      makecontext(&fiber.start, enter, 0);
    }
    for (int left = count; left > 0;) {
      left = 0;
      for (int t = 0; t < count; ++t) {
        if (fibers[t].done) continue;
        ++left;
        resume(t);
      }
    }
  }
}

}  // namespace te
