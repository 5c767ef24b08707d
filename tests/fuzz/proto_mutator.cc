#include "tests/fuzz/proto_mutator.h"

#include <google/protobuf/descriptor.h>

#include <limits>

namespace espalier::fuzz {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

class Mutator {
 public:
  Mutator(const std::vector<std::string>& words, std::mt19937_64& random)
      : words_(words), random_(random) {}

  void Change(Message& message) {
    const auto* field = PickField(message);
    if (field == nullptr) return;
    if (field->is_repeated()) {
      ChangeList(message, field);
    } else if (Below(8) == 0) {
      message.GetReflection()->ClearField(&message, field);
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      Change(*message.GetReflection()->MutableMessage(&message, field));
    } else {
      Set(message, field, -1);
    }
  }

 private:
  uint64_t Below(uint64_t end) { return random_() % end; }

  // A field that is set, four times out of five; else any.
  const FieldDescriptor* PickField(const Message& message) {
    std::vector<const FieldDescriptor*> set;
    message.GetReflection()->ListFields(message, &set);
    if (!set.empty() && Below(5) > 0) return set[Below(set.size())];
    const auto* type = message.GetDescriptor();
    return type->field_count() == 0 ? nullptr
                                    : type->field(static_cast<int>(Below(type->field_count())));
  }

  void ChangeList(Message& message, const FieldDescriptor* field) {
    const auto* reflection = message.GetReflection();
    const int size = reflection->FieldSize(message, field);
    const int index = size == 0 ? 0 : static_cast<int>(Below(size));
    const bool is_message = field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
    if (size == 0 || Below(8) == 0) {
      if (size > 1000) return;
      if (is_message) {
        Message* added = reflection->AddMessage(&message, field);
        if (size > 0 && Below(2) == 0)
          added->CopyFrom(reflection->GetRepeatedMessage(message, field, index));
      } else {
        Add(message, field);
      }
      return;
    }
    switch (Below(8)) {
      case 0:
        reflection->RemoveLast(&message, field);
        return;
      case 1:
        reflection->SwapElements(&message, field, index, static_cast<int>(Below(size)));
        return;
      default:
        break;
    }
    if (is_message) {
      Change(*reflection->MutableRepeatedMessage(&message, field, index));
    } else {
      Set(message, field, index);
    }
  }

  void Add(Message& message, const FieldDescriptor* field) {
    const auto* r = message.GetReflection();
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        r->AddInt32(&message, field, static_cast<int32_t>(Number()));
        break;
      case FieldDescriptor::CPPTYPE_INT64:
        r->AddInt64(&message, field, Number());
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        r->AddUInt32(&message, field, static_cast<uint32_t>(Number()));
        break;
      case FieldDescriptor::CPPTYPE_UINT64:
        r->AddUInt64(&message, field, static_cast<uint64_t>(Number()));
        break;
      case FieldDescriptor::CPPTYPE_FLOAT:
        r->AddFloat(&message, field, static_cast<float>(Number()));
        break;
      case FieldDescriptor::CPPTYPE_DOUBLE:
        r->AddDouble(&message, field, static_cast<double>(Number()));
        break;
      case FieldDescriptor::CPPTYPE_BOOL:
        r->AddBool(&message, field, Below(2) == 1);
        break;
      case FieldDescriptor::CPPTYPE_ENUM:
        r->AddEnumValue(&message, field, static_cast<int>(Below(20)));
        break;
      case FieldDescriptor::CPPTYPE_STRING:
        r->AddString(&message, field, Text(""));
        break;
      case FieldDescriptor::CPPTYPE_MESSAGE:
        break;
    }
  }

  // Sets a scalar, or the element `index` of a list of scalars.
  void Set(Message& message, const FieldDescriptor* field, int index) {
    const auto* r = message.GetReflection();
    const auto set = [&](auto single, auto repeated, auto value) {
      if (index < 0) {
        (r->*single)(&message, field, value);
      } else {
        (r->*repeated)(&message, field, index, value);
      }
    };
    using R = google::protobuf::Reflection;
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        return set(&R::SetInt32, &R::SetRepeatedInt32, static_cast<int32_t>(Number()));
      case FieldDescriptor::CPPTYPE_INT64:
        return set(&R::SetInt64, &R::SetRepeatedInt64, Number());
      case FieldDescriptor::CPPTYPE_UINT32:
        return set(&R::SetUInt32, &R::SetRepeatedUInt32, static_cast<uint32_t>(Number()));
      case FieldDescriptor::CPPTYPE_UINT64:
        return set(&R::SetUInt64, &R::SetRepeatedUInt64, static_cast<uint64_t>(Number()));
      case FieldDescriptor::CPPTYPE_FLOAT:
        return set(&R::SetFloat, &R::SetRepeatedFloat, static_cast<float>(Number()));
      case FieldDescriptor::CPPTYPE_DOUBLE:
        return set(&R::SetDouble, &R::SetRepeatedDouble, static_cast<double>(Number()));
      case FieldDescriptor::CPPTYPE_BOOL:
        return set(&R::SetBool, &R::SetRepeatedBool, Below(2) == 1);
      case FieldDescriptor::CPPTYPE_ENUM:
        return set(&R::SetEnumValue, &R::SetRepeatedEnumValue, static_cast<int>(Below(20)));
      case FieldDescriptor::CPPTYPE_STRING:
        return set(&R::SetString, &R::SetRepeatedString,
                   Text(index < 0 ? r->GetString(message, field)
                                  : r->GetRepeatedString(message, field, index)));
      case FieldDescriptor::CPPTYPE_MESSAGE:
        return;
    }
  }

  int64_t Number() {
    switch (Below(6)) {
      case 0:
        return (int64_t{1} << Below(63)) - static_cast<int64_t>(Below(2));
      case 1:
        return Below(2) ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
      case 2:
        return -static_cast<int64_t>(Below(3));
      default:
        return static_cast<int64_t>(Below(30));
    }
  }

  std::string Text(std::string old) {
    if (!words_.empty() && Below(4) > 0) return words_[Below(words_.size())];
    switch (Below(4)) {
      case 0:
        return old.substr(0, Below(old.size() + 1));
      case 1:
        return old + static_cast<char>(Below(256));
      case 2:
        return old + old;
      default:
        if (!old.empty()) old[Below(old.size())] = static_cast<char>(Below(256));
        return old.substr(0, 4096);
    }
  }

  const std::vector<std::string>& words_;
  std::mt19937_64& random_;
};

}  // namespace

void MutateMessage(Message& message, const std::vector<std::string>& words,
                   std::mt19937_64& random) {
  Mutator(words, random).Change(message);
}

}  // namespace espalier::fuzz
