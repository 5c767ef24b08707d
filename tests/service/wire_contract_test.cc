// The numbers, names and types of our protos against wire_contract.txt, which was taken from the
// protocol and not from them: clients of others rely on every line.
#include <fstream>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/descriptor.pb.h"
#include "gtest/gtest.h"
#include "proto/inference/grpc_service.pb.h"

namespace {

using google::protobuf::Descriptor;
using google::protobuf::EnumDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptor;

std::string Short(const std::string& full_name) {
  return absl::StrReplaceAll(full_name, {{"inference.", ""}});
}

std::string TypeOf(const FieldDescriptor& field) {
  const auto single = [](const FieldDescriptor& f) -> std::string {
    if (f.message_type() != nullptr) return Short(f.message_type()->full_name());
    return f.enum_type() != nullptr ? Short(f.enum_type()->full_name()) : f.type_name();
  };
  if (field.is_map()) {
    return absl::StrCat("map<", single(*field.message_type()->map_key()), ",",
                        single(*field.message_type()->map_value()), ">");
  }
  return absl::StrCat(field.is_repeated() ? "repeated " : "", single(field));
}

void Describe(const EnumDescriptor& type, std::set<std::string>& lines) {
  for (int i = 0; i < type.value_count(); ++i) {
    lines.insert(absl::StrCat("enum ", Short(type.full_name()), " ", type.value(i)->name(), " ",
                              type.value(i)->number()));
  }
}

void Describe(const Descriptor& message, std::set<std::string>& lines) {
  if (message.options().map_entry()) return;
  const std::string name = Short(message.full_name());
  if (message.field_count() == 0) lines.insert(absl::StrCat("message ", name));
  for (int i = 0; i < message.field_count(); ++i) {
    const FieldDescriptor& field = *message.field(i);
    const auto* oneof = field.real_containing_oneof();
    lines.insert(absl::StrCat("field ", name, " ", field.number(), " ", field.name(), " ",
                              TypeOf(field),
                              oneof != nullptr ? absl::StrCat(" oneof ", oneof->name()) : ""));
  }
  for (int i = 0; i < message.nested_type_count(); ++i) Describe(*message.nested_type(i), lines);
  for (int i = 0; i < message.enum_type_count(); ++i) Describe(*message.enum_type(i), lines);
}

std::set<std::string> Describe(const FileDescriptor& file) {
  std::set<std::string> lines;
  for (int i = 0; i < file.message_type_count(); ++i) Describe(*file.message_type(i), lines);
  for (int i = 0; i < file.enum_type_count(); ++i) Describe(*file.enum_type(i), lines);
  for (int s = 0; s < file.service_count(); ++s) {
    for (int i = 0; i < file.service(s)->method_count(); ++i) {
      const auto& method = *file.service(s)->method(i);
      lines.insert(
          absl::StrCat("rpc ", method.name(), " ", Short(method.input_type()->full_name()), " ",
                       Short(method.output_type()->full_name()), " ",
                       method.client_streaming() && method.server_streaming() ? "bidi" : "unary"));
    }
  }
  return lines;
}

TEST(WireContractTest, ProtosDeclareTheProtocolExactlyAndKServesTwoFields) {
  const FileDescriptor* service = inference::ModelInferRequest::descriptor()->file();
  std::set<std::string> declared = Describe(*service);
  declared.merge(Describe(*service->dependency(0)));
  std::set<std::string> expected;
  std::ifstream file("tests/service/wire_contract.txt");
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line[0] != '#') expected.insert(line);
  }
  ASSERT_GT(expected.size(), 300u);
  EXPECT_THAT(declared, ::testing::ContainerEq(expected));
}

TEST(WireContractTest, ThePackageAndServiceHaveTheNamesThatClientsCall) {
  const FileDescriptor* file = inference::ModelInferRequest::descriptor()->file();
  EXPECT_EQ(file->package(), "inference");
  EXPECT_EQ(file->service(0)->full_name(), "inference.GRPCInferenceService");
  EXPECT_EQ(file->service(0)->method_count(), 20);
}

}  // namespace
