#include "engine/runtime/load_line.h"

#include <iterator>

#include "absl/strings/str_cat.h"

namespace espalier::runtime {

absl::StatusOr<bool> LoadLines::Add(OperationPtr operation) {
  if (waiting_ >= kMaxWaiting) {
    return absl::ResourceExhaustedError(
        absl::StrCat(waiting_, " loads are waiting, at most ", kMaxWaiting, " may"));
  }
  Line& line = lines_[operation->model];
  const bool idle = line.running == nullptr && line.waiting.empty();
  line.waiting.push_back(std::move(operation));
  ++waiting_;
  return idle;
}

LoadLines::OperationPtr LoadLines::Next(const std::string& model) {
  const auto place = lines_.find(model);
  if (place == lines_.end()) return nullptr;  // overtaken meanwhile
  Line& line = place->second;
  if (line.running != nullptr || line.waiting.empty()) return nullptr;
  const auto take = [&] {
    OperationPtr first = std::move(line.waiting.front());
    line.waiting.pop_front();
    --waiting_;
    return first;
  };
  line.running = take();
  const auto plain = [](const LoadOperation& operation) {
    return operation.turn == nullptr && operation.request.plain() &&
           operation.overtaken_here.empty();
  };
  while (plain(*line.running) && !line.waiting.empty() && plain(*line.waiting.front())) {
    OperationPtr same = take();
    std::move(same->done.begin(), same->done.end(), std::back_inserter(line.running->done));
  }
  return line.running;
}

void LoadLines::End(const std::string& model) {
  const auto place = lines_.find(model);
  place->second.running = nullptr;
  if (place->second.waiting.empty()) lines_.erase(place);
}

std::vector<LoadLines::OperationPtr> LoadLines::Overtake(absl::string_view model,
                                                         std::optional<int64_t> version) {
  std::vector<OperationPtr> overtaken;
  const auto place = lines_.find(model);
  if (place == lines_.end()) return overtaken;
  Line& line = place->second;
  if (line.running != nullptr && version) line.running->overtaken_here.insert(*version);
  if (line.running != nullptr && !version) line.running->overtaken = true;
  std::deque<OperationPtr> staying;
  for (OperationPtr& operation : line.waiting) {
    // A load by policy that waits behind an unload of one version would bring that version back.
    // It came first, so that the unload has the last word: it is told what not to load.
    const bool hit = !version || operation->request.version == version;
    if (!hit) operation->overtaken_here.insert(*version);
    if (hit) {
      overtaken.push_back(std::move(operation));
    } else {
      staying.push_back(std::move(operation));
    }
  }
  waiting_ -= static_cast<int>(overtaken.size());
  line.waiting = std::move(staying);
  if (line.running == nullptr && line.waiting.empty()) lines_.erase(place);
  return overtaken;
}

std::vector<LoadLines::OperationPtr> LoadLines::TakeWaiting() {
  std::vector<OperationPtr> taken;
  for (auto place = lines_.begin(); place != lines_.end();) {
    for (OperationPtr& operation : place->second.waiting) taken.push_back(std::move(operation));
    place->second.waiting.clear();
    place = place->second.running == nullptr ? lines_.erase(place) : std::next(place);
  }
  waiting_ = 0;
  return taken;
}

}  // namespace espalier::runtime
