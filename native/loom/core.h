// loom's runtime: streams, events, copy engines, memory and the log of what they did. It knows
// nothing of torch, so that it compiles in seconds and can be called by its C names alone.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace loom {

// What the host is told of a device that has failed, or of a call that cannot be done.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Mode : uint8_t { eager, late, random };

// What a host may change while queues and engines work is atomic; each value is used alone.
struct Config {
  int rank = 0, world = 1, devices = 1;
  std::atomic<Mode> mode{Mode::eager};
  std::atomic<uint64_t> seed{0};
  int queues = 0;           // hardware queues that all streams share; 0: one for each stream
  int units = 2;            // kernels that run at once
  std::atomic<double> pace{0};       // bytes per second of a link; 0: as fast as memory
  std::atomic<double> deadline{60};  // seconds that a wait may take
  bool check = false;       // log every access, for the detector
  size_t heap_bytes = size_t{8} << 30;
};
const Config& config();

// ---- memory --------------------------------------------------------------------------------------

// Bytes that an operation touches: `rows` runs of `width` bytes, `pitch` apart. `space` is the rank
// whose heap they are in, or -1 - rank for that rank's host memory, with its address as offset.
struct Rect {
  int32_t space = 0;
  uint64_t offset = 0, width = 0, rows = 1, pitch = 0;
  bool write = false;
};

struct Region {
  char* device = nullptr;    // what tensors carry; nobody may touch it
  char* readable = nullptr;  // the same memory, for workers
  size_t bytes = 0;
  int rank = 0;
};
const Region& own_heap();
const Region* region_of(const void* device);  // null for host memory
char* readable(const void* device);           // host pointers are given back as they are
Rect rect_of(const void* pointer, uint64_t width, uint64_t rows, uint64_t pitch, bool write);
int heap_file();                                                // to be opened by peers
const Region& map_peer(int rank, int pid, int file, size_t bytes);  // once for each peer
int lost_peer();  // a mapped peer that ended without saying so, or that all have left; else -1

struct Stream;
void* allocate(size_t bytes, int device, Stream* stream);
void release(void* device);                         // stream-ordered: reused when its uses are over
void record_use(void* device, Stream* stream);
void release_all_uses(void* device);                // a block that any stream may have used
void poison_freed(Stream* stream);                  // before the stream's next work or block
size_t block_bytes(const void* device);             // 0 if it is no block's first byte
void empty_cache();
struct MemoryStats {
  size_t allocated = 0, peak = 0, reserved = 0, total_allocated = 0, total_freed = 0;
  size_t blocks = 0, allocations = 0;
};
MemoryStats memory_stats();
void reset_peak();
void* allocate_pinned(size_t bytes);
void free_pinned(void* pointer);
bool is_pinned(const void* pointer);

// ---- streams -------------------------------------------------------------------------------------

struct Capture;
struct Queue;

// One version of an event: the place in a stream at which it was recorded.
struct Mark {
  uint64_t id = 0;
  Stream* stream = nullptr;
  Queue* queue = nullptr;
  uint64_t place = 0;
  std::atomic<bool> done{false};
  std::atomic<int64_t> time{0};
  std::condition_variable changed;
  Capture* capture = nullptr;               // recorded while capturing: waits join that capture
  std::map<Stream*, uint64_t> captured;     // what of the capture comes before it
};
using MarkPtr = std::shared_ptr<Mark>;

struct Event {
  MarkPtr mark;
  std::mutex lock;
};

enum class Compare : uint8_t { at_least, equal, any_bit, nor };

struct Op {
  enum class Kind : uint8_t { kernel, copy, record, wait, post, hold, host };
  Kind kind = Kind::kernel;
  const char* name = "";
  std::function<void()> run;
  std::vector<Rect> rects;
  int engine = -1;           // the peer whose copy engine runs it; -1: the stream itself
  uint64_t bytes = 0;
  MarkPtr mark;              // record, wait
  std::vector<uint64_t> after;  // marks that this operation, but not its stream, comes after
  char* word = nullptr;      // post, hold: readable address
  int word_bytes = 4;
  uint64_t value = 0;
  Compare compare = Compare::at_least;
  bool signals = false;      // exchanges its word between 0 and 1: value says to which
  // Filled when it is issued:
  Stream* stream = nullptr;
  uint64_t seq = 0, place = 0;
  uint32_t host = 0;
  const char* label = "";
  const char* origin = "";
};

struct Stream {
  int id = 0, device = 0, priority = 0;
  Queue* queue = nullptr;
  std::atomic<uint64_t> issued{0};  // written under the runtime's lock; others ask if there is any
  uint64_t done = 0;                // under the runtime's lock
  Capture* capture = nullptr;
  std::atomic<bool> owes{false};  // whether freed blocks of this stream are not poisoned yet
};

Stream* default_stream(int device);
Stream* new_stream(int device, int priority);
Stream* stream_of(int device, int64_t id);
Stream* current_stream(int device);
Stream* set_current_stream(Stream* stream);  // gives the one before
int current_device();
int set_current_device(int device);          // gives the one before
std::vector<Stream*> all_streams();

void issue(Stream* stream, Op op);
void enqueue(Stream* stream, Op op);         // issue, whether or not the stream is capturing
MarkPtr record(Stream* stream);
void wait(Stream* stream, const MarkPtr& mark);
bool finished(const MarkPtr& mark);          // the host learns the order if it is
void synchronize(const MarkPtr& mark);
void synchronize(Stream* stream);
void synchronize_device();
bool stream_idle(Stream* stream);
// Waits until a stream has done all that was issued, but is no order that a program may rely on:
// a real device would not have waited.
void settle(Stream* stream);

void post(Stream* stream, void* word, uint64_t value, int bytes, const char* name);
void hold(Stream* stream, void* word, uint64_t value, int bytes, Compare compare, const char* name);
void copy(Stream* stream, void* target, size_t target_pitch, const void* source,
          size_t source_pitch, size_t width, size_t rows, const char* name);
void fill(Stream* stream, void* target, uint32_t value, int item_bytes, size_t count,
          const char* name);

// A kernel that is a function of the process, called with a number when the stream comes to it.
using Function = void (*)(uint64_t number);
void launch(Stream* stream, const char* name, Function function, uint64_t number);
// What such a kernel says while it runs: that it failed, which bytes it touches, and which value of
// a word it saw, after which it comes after whoever posted it.
void kernel_failed(const char* why);
void kernel_touched(const char* pointer, uint64_t width, uint64_t rows, uint64_t pitch, bool write);
void kernel_saw(const char* word, uint64_t value);
struct Running {
  explicit Running(const Op& op);
  ~Running();
};

// ---- signals of symmetric memory: a word is set when it is 0, and cleared when it is 1 -----------

void put_signal(Stream* stream, void* word, const char* name);
void take_signal(Stream* stream, void* word, const char* name);
void barrier(Stream* stream, const std::vector<void*>& theirs, const std::vector<void*>& mine);

// ---- engines -------------------------------------------------------------------------------------

void run_on_engine(int peer, const std::function<void()>& job, uint64_t bytes);
struct Unit {  // one of the places where kernels run, given by priority
  explicit Unit(int priority);
  ~Unit();
};

// ---- failures ------------------------------------------------------------------------------------

void fail(const std::string& why);   // the device is broken from now on, as a GPU after a fault
bool broken();
void check_health();                 // raises what broke the device
void clear_failure();
void inject_failure(const std::string& why);  // the next kernel throws
void shut_down();

// ---- capture -------------------------------------------------------------------------------------

struct Graph;
Graph* new_graph();
void capture_begin(Graph* graph, Stream* stream);
void capture_end(Graph* graph);
void replay(Graph* graph, Stream* stream);
void reset(Graph* graph);
void delete_graph(Graph* graph);
size_t graph_size(Graph* graph);
bool capturing();                    // somewhere in this process
void capture_op(Stream* stream, Op op);

// ---- the log -------------------------------------------------------------------------------------

int64_t now_ns();
const char* intern(const std::string& text);
void set_label(const char* label);   // of this thread's next operations
const char* current_label();
using OriginCallback = const char* (*)();
void set_origin_callback(OriginCallback callback);
const char* origin_here();
bool logging();
void set_logging(bool on);
uint32_t host_clock();
void log_op(const Op& op, int64_t start, int64_t end);
void log_record(const Op& op);
void log_wait(const Op& op);
void log_post(const Op& op, const Rect& word, uint64_t value);
void log_hold(const Op& op, const Rect& word, Compare compare, uint64_t value);
void log_host_mark(uint64_t mark);
void log_host_enter(const std::string& key);
void log_host_leave(const std::string& key, const std::vector<int>& peers);
void log_touch(int rank, uint64_t offset);  // by the host; safe in a signal handler
void log_pending(const std::string& why);
void log_finding(const char* kind, const std::string& what);
void open_session(const char* path);

// What the ranks of one session show each other, one for each rank.
struct Status {
  std::atomic<int32_t> pid, blocked, running, exited;
  std::atomic<uint64_t> progress, log_used, log_lost;
};
Status& status(int rank);
int lost_rank();  // of the session, one whose process is no more; else -1
int killed_rank();  // of the session, one whose process ended without leaving it; else -1
int standstills();
bool all_stuck(int before);  // no rank of the session can go on; before: standstills() at the start
void host_blocks(bool blocks);

struct HostBlocked {   // the host waits for the device
  HostBlocked() { host_blocks(true); }
  ~HostBlocked() { host_blocks(false); }
};

// Gives the interpreter's lock away while it lives, if this thread has it.
struct WithoutGil {
  WithoutGil();
  ~WithoutGil();
  void* state = nullptr;
};

}  // namespace loom
