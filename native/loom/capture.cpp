// Graphs: what is issued to a capturing stream is kept instead of run, and issued again by each
// replay. Streams join a capture by waiting for an event of it, and must be joined back.
#include <algorithm>
#include <set>

#include "queue.h"

namespace loom {

struct Node {
  Stream* stream;
  Op op;
};

struct Capture {
  Stream* origin = nullptr;
  std::vector<Node> nodes;
  std::map<Stream*, uint64_t> lengths;                    // operations of each stream
  std::map<Stream*, std::map<Stream*, uint64_t>> before;  // what each stream comes after
};

struct Graph {
  std::unique_ptr<Capture> capture;
  bool under_way = false;
  std::map<Stream*, Stream*> branches;  // forked streams run on streams of the graph's own
};

namespace {
std::mutex& capture_lock() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::set<Capture*>& under_way() {
  static auto* value = new std::set<Capture*>;
  return *value;
}
std::atomic<int> captures{0};
}  // namespace

bool capturing() { return captures > 0; }

Graph* new_graph() { return new Graph; }

size_t graph_size(Graph* graph) { return graph->capture ? graph->capture->nodes.size() : 0; }

void capture_begin(Graph* graph, Stream* stream) {
  check_health();
  if (graph->capture) throw Error("loom: the graph holds a capture already; reset it first");
  if (stream->capture) throw Error("loom: the stream is capturing already");
  if (stream == default_stream(stream->device))
    throw Error("loom: the default stream cannot capture; use a torch.Stream, as on a GPU");
  std::lock_guard guard(capture_lock());
  graph->capture = std::make_unique<Capture>();
  graph->capture->origin = stream;
  graph->under_way = true;
  stream->capture = graph->capture.get();
  under_way().insert(stream->capture);
  ++captures;
}

void capture_op(Stream* stream, Op op) {
  std::lock_guard guard(capture_lock());
  if (op.kind == Op::Kind::wait) {
    auto& mark = *op.mark;
    if (!mark.capture)
      throw Error(
          "loom: a capturing stream waits for an event that was recorded outside of the capture");
    if (!under_way().count(mark.capture))
      throw Error("loom: a stream waits for an event of a capture that is over");
    if (stream->capture && stream->capture != mark.capture)
      throw Error("loom: a stream waits for an event of another capture");
    stream->capture = mark.capture;
    auto& known = mark.capture->before[stream];
    for (auto& [other, length] : mark.captured) known[other] = std::max(known[other], length);
  }
  auto& capture = *stream->capture;
  if (op.kind == Op::Kind::record) {
    op.mark->capture = &capture;
    op.mark->captured = capture.before[stream];
    op.mark->captured[stream] = capture.lengths[stream];
  } else if (op.kind != Op::Kind::wait) {
    ++capture.lengths[stream];
  }
  capture.nodes.push_back({stream, std::move(op)});
}

void capture_end(Graph* graph) {
  if (!graph->under_way) throw Error("loom: the graph is not capturing");
  auto& capture = *graph->capture;
  std::string unjoined;
  {
    std::lock_guard guard(capture_lock());
    graph->under_way = false;
    under_way().erase(&capture);
    --captures;
    auto& known = capture.before[capture.origin];
    for (auto* stream : all_streams()) {
      if (stream->capture != &capture) continue;
      stream->capture = nullptr;
      if (stream != capture.origin && known[stream] < capture.lengths[stream])
        for (auto& node : capture.nodes)
          if (node.stream == stream && node.op.kind != Op::Kind::record &&
              node.op.kind != Op::Kind::wait)
            unjoined = std::string(node.op.name) + " on stream " + std::to_string(stream->id) +
                       (node.op.origin[0] ? std::string(", issued at ") + node.op.origin : "");
    }
  }
  release_late_blocks();
  if (!unjoined.empty()) {
    log_finding("unjoined", unjoined);
    reset(graph);
    throw Error("loom: the capture has work that was not joined back to its first stream: " +
                unjoined);
  }
}

void replay(Graph* graph, Stream* stream) {
  check_health();
  if (!graph->capture || graph->under_way) throw Error("loom: the graph has captured nothing");
  if (stream->capture) throw Error("loom: a graph cannot be replayed into a capture");
  auto& capture = *graph->capture;
  std::map<Mark*, MarkPtr> marks;  // every replay records events of its own
  std::map<Stream*, bool> forked;
  const auto begun = record(stream);
  const uint32_t host = host_clock();
  auto place = [&](Stream* captured) {
    if (captured == capture.origin) return stream;
    auto& branch = graph->branches[captured];
    if (!branch) branch = new_stream(captured->device, captured->priority);
    if (!forked[branch]) {
      forked[branch] = true;
      wait(branch, begun);
    }
    return branch;
  };
  for (auto& node : capture.nodes) {
    auto* to = place(node.stream);
    Op op = node.op;
    op.host = host;
    if (op.kind == Op::Kind::record) {
      marks[node.op.mark.get()] = record(to);
    } else if (op.kind == Op::Kind::wait) {
      wait(to, marks.at(node.op.mark.get()));
    } else {
      enqueue(to, std::move(op));
    }
  }
  for (auto& [branch, used] : forked)
    if (used) wait(stream, record(branch));
}

void reset(Graph* graph) {
  if (!graph->capture) return;
  if (graph->under_way) {
    std::lock_guard guard(capture_lock());
    graph->under_way = false;
    under_way().erase(graph->capture.get());
    --captures;
    for (auto* stream : all_streams())
      if (stream->capture == graph->capture.get()) stream->capture = nullptr;
  }
  if (!capturing()) release_captured(graph->capture.get());
  graph->capture.reset();
  graph->branches.clear();
}

void delete_graph(Graph* graph) {
  try {
    reset(graph);
  } catch (const std::exception&) {
    // The device has failed, or the process ends.
  }
  delete graph;
}

}  // namespace loom
