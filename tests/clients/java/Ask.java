import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;

/**
 * Posts a body to a URL with the JDK's client as it is, which offers HTTP/2: `java Ask.java URL FILE`.
 *
 * <p>The body goes with its length and in chunks, on one connection. Prints a line for each: version, status and answer.
 */
public class Ask {
  public static void main(String[] arguments) throws Exception {
    byte[] body = Files.readAllBytes(Path.of(arguments[1]));
    HttpClient client = HttpClient.newHttpClient();
    BodyPublisher sized = BodyPublishers.ofByteArray(body);
    BodyPublisher chunked = BodyPublishers.fromPublisher(BodyPublishers.ofByteArrays(Arrays.asList(body)));
    for (BodyPublisher publisher : new BodyPublisher[] {sized, chunked, sized}) {
      HttpRequest request =
          HttpRequest.newBuilder(URI.create(arguments[0])).header("Content-Type", "application/json").POST(publisher).build();
      HttpResponse<String> answer = client.send(request, BodyHandlers.ofString(StandardCharsets.UTF_8));
      System.out.println(answer.version() + " " + answer.statusCode() + " " + answer.body().strip());
    }
  }
}
