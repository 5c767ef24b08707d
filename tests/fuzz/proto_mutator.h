// proto_mutator.h — changes one thing in a protobuf message, whatever its type.
#pragma once

#include <google/protobuf/message.h>

#include <random>
#include <string>
#include <vector>

namespace espalier::fuzz {

// Sets, clears, adds, removes, copies or swaps one field somewhere in `message`. Strings are mostly taken from `words`
// (names that mean something in the format), numbers mostly from the borders of their types.
void MutateMessage(google::protobuf::Message& message, const std::vector<std::string>& words,
                   std::mt19937_64& random);

}  // namespace espalier::fuzz
