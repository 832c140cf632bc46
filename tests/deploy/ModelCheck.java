// Reads YAML documents from stdin into the operators' own model classes, and refuses what these do not know.
// One line for each document: "ok KIND NAME", or "refused KIND NAME: why". Exit 1 if one was refused.

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.MappingIterator;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.dataformat.yaml.YAMLFactory;
import java.lang.reflect.Method;
import java.util.Collection;
import java.util.Map;

public class ModelCheck {
    static final Map<String, String> MODELS = Map.of(
            "kafka.strimzi.io/v1 Kafka", "io.strimzi.api.kafka.model.kafka.Kafka",
            "kafka.strimzi.io/v1 KafkaNodePool", "io.strimzi.api.kafka.model.nodepool.KafkaNodePool",
            "kafka.strimzi.io/v1 KafkaUser", "io.strimzi.api.kafka.model.user.KafkaUser",
            "monitoring.coreos.com/v1 PodMonitor", "io.fabric8.openshift.api.model.monitoring.v1.PodMonitor");

    public static void main(String[] arguments) throws Exception {
        ObjectMapper mapper = new ObjectMapper(new YAMLFactory());
        boolean refused = false;
        try (MappingIterator<JsonNode> documents = mapper.readerFor(JsonNode.class).readValues(System.in)) {
            while (documents.hasNext()) {
                JsonNode document = documents.next();
                String kind = document.path("kind").asText();
                String name = kind + " " + document.path("metadata").path("name").asText();
                String why = check(mapper, document, document.path("apiVersion").asText() + " " + kind);
                System.out.println(why == null ? "ok " + name : "refused " + name + ": " + why);
                refused |= why != null;
            }
        }
        System.exit(refused ? 1 : 0);
    }

    static String check(ObjectMapper mapper, JsonNode document, String model) {
        String type = MODELS.get(model);
        if (type == null) {
            return "there is no model of " + model;
        }
        try {
            Object read = mapper.treeToValue(document, Class.forName(type));
            String unknown = unknown(read, "");
            return unknown != null ? unknown : lost(document, mapper.valueToTree(read), "");
        } catch (Exception error) {
            return error.getMessage().lines().findFirst().orElse("") + where(error);
        }
    }

    static String where(Exception error) {
        return error instanceof com.fasterxml.jackson.databind.JsonMappingException mapping
                ? " at " + mapping.getPathReference().replaceAll("[\\w.]+\\.(\\w+)\\[", "$1[")
                : "";
    }

    // The models keep fields that they do not know aside. Returns the first, or null.
    static String unknown(Object value, String path) throws Exception {
        if (value instanceof Collection<?> items) {
            for (Object item : items) {
                String found = unknown(item, path + "[]");
                if (found != null) {
                    return found;
                }
            }
        } else if (value != null && !(value instanceof Enum)
                && value.getClass().getName().matches("io\\.(strimzi|fabric8)\\..*")) {
            for (Method method : value.getClass().getMethods()) {
                if (!method.getName().startsWith("get") || method.getParameterCount() > 0) {
                    continue;
                }
                if (method.getName().equals("getAdditionalProperties")) {
                    Map<?, ?> more = (Map<?, ?>) method.invoke(value);
                    if (more != null && !more.isEmpty()) {
                        return "unknown field " + path + "." + more.keySet().iterator().next();
                    }
                } else if (!method.getName().equals("getClass")) {
                    String name = Character.toLowerCase(method.getName().charAt(3)) + method.getName().substring(4);
                    String found = unknown(method.invoke(value), path + "." + name);
                    if (found != null) {
                        return found;
                    }
                }
            }
        }
        return null;
    }

    // A value that a model does not know becomes nothing: all that was given must be there when it is written again.
    static String lost(JsonNode given, JsonNode written, String path) {
        if (given.isObject()) {
            for (var field : given.properties()) {
                if (path.isEmpty() && field.getKey().equals("apiVersion")) {
                    continue; // a model writes the version that its operator asks for; MODELS has looked at this one
                }
                JsonNode other = written.get(field.getKey());
                String here = path + "." + field.getKey();
                boolean empty = field.getValue().isContainerNode() && field.getValue().isEmpty();
                String gone = empty ? null : "not taken: " + here;
                String found = other != null ? lost(field.getValue(), other, here) : gone;
                if (found != null) {
                    return found;
                }
            }
        } else if (given.isArray()) {
            for (int i = 0; i < given.size(); i++) {
                String here = path + "[" + i + "]";
                String found = i < written.size() ? lost(given.get(i), written.get(i), here) : "not taken: " + here;
                if (found != null) {
                    return found;
                }
            }
        } else if (!given.asText().equals(written.asText())) {
            return "not taken: " + path + " = " + given.asText();
        }
        return null;
    }
}
